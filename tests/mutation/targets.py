"""What is mutated, and the tests that ought to notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

SETTINGS = "tests/unit/test_reference.py::test_the_page_in_the_repository_says_what_the_settings_are"


@dataclass(frozen=True, slots=True)
class Target:
    """One part of the code. Paths are relative to `root`."""

    name: str
    sources: tuple[str, ...]  # files, or folders whose files are meant
    tests: tuple[str, ...]
    root: Path = ROOT

    def files(self) -> list[str]:
        """Every Python file of the sources, sorted. Raises FileNotFoundError."""
        found: set[str] = set()
        for source in self.sources:
            path = self.root / source
            if not path.exists():
                raise FileNotFoundError(f"target {self.name}: {source} does not exist")
            files = path.rglob("*.py") if path.is_dir() else [path]
            found |= {str(file.relative_to(self.root)) for file in files}
        return sorted(found)


TARGETS = (
    Target(
        "dispatch",
        ("services/router/dispatch",),
        (
            "tests/unit/router/dispatch",
            "tests/integration/router/test_dispatch.py",
            "tests/integration/router/test_hand_over.py",
            "tests/integration/router/test_explain.py",
            "tests/integration/router/test_placing.py",
        ),
    ),
    Target(
        "admission",
        ("services/router/admission",),
        ("tests/unit/router/admission", "tests/integration/router/test_placing.py", SETTINGS),
    ),
    Target("placement", ("services/router/placement",), ("tests/unit/router/placement", SETTINGS)),
    Target("pool", ("shared/kv/pool.py",), ("tests/unit/kv/test_pool.py",)),
    Target("scheduler", ("shared/engine/scheduler",), ("tests/unit/engine/scheduler",)),
    Target(
        "handoff",
        ("shared/kv/handoff",),
        ("tests/unit/kv/handoff", "tests/unit/kv/test_encryption.py", "tests/unit/kv/test_fleet_key.py"),
    ),
    Target("tiers", ("services/kvstore/tiers",), ("tests/unit/kvstore/tiers",)),
    Target(
        "edge",
        ("services/router/edge",),
        (
            "tests/unit/router/edge",
            "tests/integration/router_edge/test_http.py",
            "tests/integration/router_edge/test_grpc.py",
            "tests/integration/router_edge/test_http_limits.py",
            "tests/integration/router_edge/test_messages.py",
            "tests/integration/router_edge/test_models.py",
            "tests/integration/router_edge/test_responses.py",
            "tests/integration/router_edge/test_tools.py",
        ),
    ),
    Target("index", ("shared/kv_index",), ("tests/unit/kv_index", "tests/integration/kvstore/test_match_stream.py")),
    Target("planner", ("services/planner",), ("tests/unit/planner", SETTINGS)),
)
"""Their tests take seconds: each mutant runs them all, unless one fails earlier."""
