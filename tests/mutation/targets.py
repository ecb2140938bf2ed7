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


EDGE_SHELF = tuple(
    f"tests/integration/router_edge/test_{name}.py"
    for name in ("batches", "conversations", "mcp", "responses", "tools")
)
TARGETS = (
    Target(
        "dispatch",
        ("services/router/dispatch",),
        (
            "tests/unit/router/dispatch",
            "tests/integration/router/test_dispatch.py",
            "tests/integration/router/test_hand_over.py",
            "tests/integration/router/test_explain.py",
            "tests/integration/router/test_moves.py",
            "tests/integration/router/test_placing.py",
            "tests/integration/router/test_reassignment.py",
            "tests/integration/router/test_sessions_of_clients.py",
            "tests/integration/router/test_take_over.py",
        ),
    ),
    Target(
        "admission",
        ("services/router/admission",),
        ("tests/unit/router/admission", "tests/integration/router/test_placing.py", SETTINGS),
    ),
    Target("placement", ("services/router/placement",), ("tests/unit/router/placement", SETTINGS)),
    Target(
        "split",
        tuple(f"services/router/placement/{name}.py" for name in ("cut_pairs", "founded", "pairs", "parts", "split")),
        ("tests/unit/router/placement",),
    ),
    Target(
        "adapters",
        (
            "services/worker/adapters",
            "services/router/workers/adapters.py",
            "services/router/placement/adapter_sets.py",
        ),
        (
            "tests/unit/worker/adapters",
            "tests/unit/router/workers/test_adapters.py",
            "tests/unit/router/placement/test_adapter_sets.py",
        ),
    ),
    Target(
        "worker",
        tuple(f"services/worker/{name}.py" for name in ("attempt", "host", "sequences", "session")),
        (
            "tests/unit/worker",
            "tests/integration/worker/test_sessions.py",
            "tests/integration/worker/test_both_roles.py",
        ),
    ),
    Target("pool", ("shared/kv/pool.py", "shared/kv/free_lists.py"), ("tests/unit/kv/test_pool.py",)),
    Target(
        "retention",
        ("shared/kv/retained.py", "shared/kv/next_turns.py"),
        ("tests/unit/kv/test_retained_order.py", "tests/unit/kv/test_pool.py"),
    ),
    Target(
        "packing",
        ("shared/kv/packing.py", "shared/kv/block_memory.py"),
        ("tests/unit/kv/test_block_memory.py", "tests/unit/kv/handoff", "tests/unit/worker/test_host.py"),
    ),
    Target("scheduler", ("shared/engine/scheduler",), ("tests/unit/engine/scheduler",)),
    Target("speculation", ("shared/engine/speculation",), ("tests/unit/engine/speculation",)),
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
            *EDGE_SHELF,
            *(
                f"tests/integration/router_edge/test_{name}.py"
                for name in ("grpc", "grpc_limits", "http", "http_limits", "messages", "models", "pages", "pooling")
            ),
            "tests/integration/router_edge/test_resume.py",
            "tests/integration/router_edge/test_tenants_adapters.py",
        ),
    ),
    Target(
        "shelf",
        ("services/router/edge/http/batches", "services/router/edge/http/responses"),
        ("tests/unit/router/edge/http/test_batch_runner.py", *EDGE_SHELF),
    ),
    Target("index", ("shared/kv_index",), ("tests/unit/kv_index", "tests/integration/kvstore/test_match_stream.py")),
    Target("planner", ("services/planner",), ("tests/unit/planner", SETTINGS)),
)
"""Their tests take seconds: each mutant runs them all, unless one fails earlier."""
