"""A simulated pool whose workers start, drain and end, and what GPU time that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.simulator.fleet import World
from loadtest.simulator.router import SimRouter
from loadtest.simulator.worker import Worker
from services.planner.policy.observation import PoolCount

_LOOK_S = 1.0
"""Time between two looks at whether a draining worker is idle."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """How long a worker takes to begin and to end, seconds."""

    start_s: float = 120.0
    """From the decision until it serves: image, weights, warm-up."""
    cold_s: float = 60.0
    """Its first seconds as a ready worker, whose latencies the planner does not learn from."""


@dataclass(slots=True)
class _Member:
    worker: Worker
    began_s: float
    ready_s: float = -1.0
    """Below 0 while it starts."""
    draining: bool = False


@dataclass(slots=True)
class PoolUse:
    """What a pool has cost so far."""

    held_s: float = 0.0
    """Seconds of workers that are gone, each from the decision to start it to its end."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    """(time, replicas) after each change."""


class ElasticPool:
    """Workers by name in `serving`, which the routers share; names are never used again."""

    def __init__(
        self, world: World, make: Callable[[str], Worker], letter: str, serving: dict[str, Worker], life: Lifecycle
    ) -> None:
        """`make` makes the worker of a name."""
        self._world, self._make, self._letter, self._life = world, make, letter, life
        self._serving = serving
        self._members: dict[str, _Member] = {}
        self._num_made = 0
        self._gone_busy_s = 0.0
        self.routers: list[SimRouter] = []
        self.use = PoolUse()
        self.replicas = 0

    def begin(self, count: int) -> None:
        """Workers that serve from the start."""
        for _ in range(count):
            self._ready(self._add())
        self._resized(count)

    def scale(self, replicas: int) -> None:
        """Starts workers, or drains the least loaded ones, which then end."""
        active = [member for member in self._members.values() if not member.draining]
        for _ in range(replicas - len(active)):
            member = self._add()
            self._world.clock.after(self._life.start_s, self._ready, member)
        active.sort(key=lambda member: (member.ready_s >= 0, member.worker.num_requests))
        for member in active[: max(0, len(active) - replicas)]:
            member.draining = True
            for router in self.routers if member.ready_s >= 0 else ():
                router.drain_worker(member.worker.name)
            self._world.clock.after(_LOOK_S, self._end_if_idle, member)
        self._resized(replicas)

    @property
    def count(self) -> PoolCount:
        """The pool's numbers of workers, as the planner takes them."""
        ready = [member for member in self._members.values() if member.ready_s >= 0 and not member.draining]
        cold_since_s = self._world.clock.now_s - self._life.cold_s
        return PoolCount(
            replicas=self.replicas,
            num_ready=len(ready),
            num_ending=sum(member.draining for member in self._members.values()),
            num_cold=sum(member.ready_s > max(0.0, cold_since_s) for member in ready),
        )

    @property
    def workers(self) -> list[Worker]:
        """All that serve or drain."""
        return [member.worker for member in self._members.values() if member.ready_s >= 0]

    @property
    def busy_s(self) -> float:
        """Seconds of steps of all its workers so far, those that are gone included."""
        return self._gone_busy_s + sum(worker.engine.busy_s for worker in self.workers)

    def held_s(self, now_s: float) -> float:
        """Worker seconds so far, starting and draining included."""
        return self.use.held_s + sum(now_s - member.began_s for member in self._members.values())

    def _add(self) -> _Member:
        name = f"{self._letter}{self._num_made}"
        self._num_made += 1
        member = self._members[name] = _Member(self._make(name), self._world.clock.now_s)
        return member

    def _ready(self, member: _Member) -> None:
        if member.draining:
            return
        member.ready_s = self._world.clock.now_s
        self._serving[member.worker.name] = member.worker
        for router in self.routers:
            router.add_worker(member.worker)

    def _end_if_idle(self, member: _Member) -> None:
        worker = member.worker
        if worker.num_requests or worker.engine.pool.num_used:
            self._world.clock.after(_LOOK_S, self._end_if_idle, member)
            return
        del self._members[worker.name]
        self._serving.pop(worker.name, None)
        for router in self.routers if member.ready_s >= 0 else ():
            router.remove_worker(worker.name)
        worker.forget()
        self._gone_busy_s += worker.engine.busy_s
        self.use.held_s += self._world.clock.now_s - member.began_s

    def _resized(self, replicas: int) -> None:
        if replicas != self.replicas:
            self.replicas = replicas
            self.use.changes.append((self._world.clock.now_s, replicas))
