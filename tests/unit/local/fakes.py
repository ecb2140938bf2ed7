"""Scripted processes in the services' places."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.local.commands import WorkerPlan
from services.local.spec import ClusterSpec
from shared.identity import WorkerRole
from tests.waiting import DEADLINE_S

FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


def fake_spec(folder: Path) -> ClusterSpec:
    """A small cluster on free ports with all its files, and something like a model, in `folder`."""
    model = folder / "a-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return ClusterSpec(
        model=model, http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=folder / "state", start_timeout_s=DEADLINE_S
    )


@dataclass
class FakeCommands:
    """Implements ServiceCommands with fake_service.py; `behaviours` by process name, "serves" otherwise."""

    journal: Path
    behaviours: dict[str, str] = field(default_factory=dict)
    workers: list[WorkerPlan] = field(default_factory=list)
    routed: dict[str, dict[str, str]] = field(default_factory=dict)
    kvstores: set[str] = field(default_factory=set)
    redis_url: str = ""

    def check(self) -> None:
        """Anything will do."""

    def process(self, name: str, behaviour: str = "serves") -> list[str]:
        chosen = self.behaviours.get(name, behaviour)
        return [sys.executable, "-I", "-S", str(FAKE_SERVICE), name, str(self.journal), chosen]

    def kvstore(self, bind: str, redis_url: str) -> Sequence[str]:
        self.kvstores.add(bind)
        self.redis_url = redis_url
        return self.process("kvstore")

    def store_node(self, number: int, bind: str, redis_url: str) -> Sequence[str]:
        assert bind not in self.kvstores
        assert redis_url == self.redis_url
        return self.process(f"store-{number}")

    def worker(self, plan: WorkerPlan, kvstore: str) -> Sequence[str]:
        self.kvstores.add(kvstore)
        self.workers.append(plan)
        return self.process(plan.name)

    def router(
        self, workers: Mapping[WorkerRole, Mapping[str, str]], kvstore: str, stores: str = "", number: int = 0
    ) -> Sequence[str]:
        self.kvstores.add(kvstore)
        self.routed = {role: dict(addresses) for role, addresses in workers.items()}
        return self.process(f"router-{number}" if number else "router", "router")

    def pid(self, name: str) -> int:
        """The latest process of that name."""
        lines = Path(f"{self.journal}.pids").read_text().splitlines()
        return int(next(line.split()[1] for line in reversed(lines) if line.split()[0] == name))

    def events(self) -> list[str]:
        """The journal's lines so far."""
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def index_is_there(self) -> bool:
        """True while the embedded index has its socket."""
        return Path(self.redis_url.removeprefix("unix://")).exists()
