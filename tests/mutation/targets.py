"""What is mutated, and the tests that ought to notice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]

SETTINGS = "tests/unit/test_reference.py::test_the_page_in_the_repository_says_what_the_settings_are"


@dataclass(frozen=True, slots=True)
class Target:
    """One part of the code. Paths are relative to `root`."""

    name: str
    sources: tuple[str, ...]  # files, or folders whose files are meant
    tests: tuple[str, ...]
    wider: tuple[str, ...] = ()
    """Tests of what the part serves in, for a mutant that its own let pass. They take up to a minute."""
    root: Path = ROOT

    def widely(self) -> Target:
        """The part with the wider tests in the place of its own."""
        return replace(self, tests=self.wider, wider=())

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
ROUTER = ("tests/integration/router", "tests/unit/router")
TARGETS = (
    Target(
        "dispatch",
        ("services/router/dispatch",),
        (
            "tests/unit/router/dispatch",
            "tests/integration/router/test_dispatch.py",
            "tests/integration/router/test_hand_over.py",
            "tests/integration/router/test_explain.py",
            "tests/integration/router/test_heartbeats.py",
            "tests/integration/router/test_moves.py",
            "tests/integration/router/test_placing.py",
            "tests/integration/router/test_reassignment.py",
            "tests/integration/router/test_sessions_of_clients.py",
            "tests/integration/router/test_take_over.py",
        ),
        wider=ROUTER,
    ),
    Target(
        "admission",
        ("services/router/admission",),
        ("tests/unit/router/admission", "tests/integration/router/test_placing.py", SETTINGS),
        wider=ROUTER,
    ),
    Target("placement", ("services/router/placement",), ("tests/unit/router/placement", SETTINGS), wider=ROUTER),
    Target(
        "split",
        tuple(f"services/router/placement/{name}.py" for name in ("cut_pairs", "founded", "pairs", "parts", "split")),
        ("tests/unit/router/placement",),
        wider=ROUTER,
    ),
    Target(
        "adapters",
        (
            "services/worker/adapters",
            "services/router/workers/adapter_names.py",
            "services/router/placement/adapter_sets.py",
        ),
        (
            "tests/unit/worker/adapters",
            "tests/unit/router/workers/test_adapters.py",
            "tests/unit/router/placement/test_adapter_sets.py",
        ),
        wider=("tests/unit/router/placement", "tests/unit/router/workers"),
    ),
    Target(
        "worker",
        tuple(f"services/worker/{name}.py" for name in ("attempt", "host", "sequences", "session")),
        (
            "tests/unit/worker",
            "tests/integration/worker/test_sessions.py",
            "tests/integration/worker/test_both_roles.py",
        ),
        wider=("tests/integration/worker",),
    ),
    Target(
        "pool",
        ("shared/kv/pool.py", "shared/kv/free_lists.py"),
        ("tests/unit/kv/test_pool.py", "tests/unit/kv/test_retained_order.py"),
        wider=("tests/unit/kv", "tests/unit/engine/scheduler"),
    ),
    Target(
        "retention",
        ("shared/kv/retained.py", "shared/kv/next_turns.py"),
        ("tests/unit/kv/test_retained_order.py", "tests/unit/kv/test_pool.py"),
        wider=("tests/unit/engine/scheduler",),
    ),
    Target(
        "packing",
        ("shared/kv/packing.py", "shared/kv/block_memory.py"),
        ("tests/unit/kv/test_block_memory.py", "tests/unit/kv/handoff", "tests/unit/worker/test_host.py"),
        wider=("tests/integration/kv",),
    ),
    Target(
        "scheduler",
        ("shared/engine/scheduler",),
        ("tests/unit/engine/scheduler",),
        wider=tuple(f"tests/integration/engine/test_{name}.py" for name in ("beams", "pooling", "preemption")),
    ),
    Target(
        "speculation",
        ("shared/engine/speculation",),
        ("tests/unit/engine/speculation",),
        wider=("tests/unit/engine/scheduler", "tests/integration/engine/test_speculation.py"),
    ),
    Target(
        "handoff",
        ("shared/kv/handoff",),
        ("tests/unit/kv/handoff", "tests/unit/kv/test_encryption.py", "tests/unit/kv/test_fleet_key.py"),
        wider=("tests/integration/kv", "tests/integration/worker/test_stalled_hand_offs.py"),
    ),
    Target(
        "tiers",
        ("services/kvstore/tiers",),
        ("tests/unit/kvstore/tiers",),
        wider=("tests/unit/kvstore", "tests/integration/kvstore"),
    ),
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
        wider=("tests/integration/router_edge", "tests/unit/router"),
    ),
    Target(
        "shelf",
        ("services/router/edge/http/batches", "services/router/edge/http/responses"),
        ("tests/unit/router/edge/http/test_batch_runner.py", *EDGE_SHELF),
        wider=("tests/unit/router/edge",),
    ),
    Target(
        "index",
        ("shared/kv_index",),
        ("tests/unit/kv_index", "tests/integration/kvstore/test_match_stream.py"),
        wider=("tests/unit/kvstore", "tests/integration/kvstore"),
    ),
    Target(
        "planner",
        ("services/planner",),
        ("tests/unit/planner", SETTINGS),
        wider=("tests/unit/kubernetes", "tests/unit/loadtest/simulator/test_planning.py"),
    ),
)
"""Their own tests take seconds: each mutant runs them all, unless one fails earlier."""
