"""One run of an elastic fleet: sized by the planner, or by a schedule made in advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from loadtest.simulator.clock import Clock
from loadtest.simulator.fleet import DECODE_CHUNK, PREFILL_CHUNK, WorkerSpec, World
from loadtest.simulator.outcome import Targets
from loadtest.simulator.planning.counting_router import CountingRouter, Counts
from loadtest.simulator.planning.elastic_pool import ElasticPool, Lifecycle
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import SimRequest, from_trace
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.simulator.worker import Worker
from loadtest.workloads.trace import BLOCK_LEN, TraceRequest
from services.planner.policy.budget import Pair, replicas_now
from services.planner.policy.config import PlannerConfig
from services.planner.policy.observation import Observation
from services.planner.policy.planner import Decision, Planner
from shared.identity import DECODE, PREFILL, Roles


@dataclass(frozen=True, slots=True)
class ElasticSetup:
    """The fleet without its size."""

    worker: WorkerSpec
    gpus: int
    """GPUs of a worker."""
    targets: Targets
    tandem: TandemConfig = field(default_factory=TandemConfig)
    life: Lifecycle = field(default_factory=Lifecycle)
    tick_s: float = 10.0
    """Time between two decisions."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ElasticOutcome:
    """What a run gave, over the time from the first to the last arrival."""

    requests: Sequence[SimRequest]
    attainment: float
    """Share of all requests, refused ones included, that met both targets."""
    gpu_hours: float
    prefill_changes: Sequence[tuple[float, int]]
    """(time, replicas), the first one being the beginning."""
    decode_changes: Sequence[tuple[float, int]]
    decisions: Sequence[tuple[float, Decision]]
    """Decisions that changed a size; none for a schedule."""
    max_gpus: int
    """Most GPUs held at any look."""

    @property
    def shortest_turn_s(self) -> float:
        """Least time between two changes of direction of a pool, seconds; infinite where there are no two."""
        return min(_shortest_turn_s(self.prefill_changes), _shortest_turn_s(self.decode_changes))

    def num_changes(self, from_s: float = 0.0) -> int:
        """Changes of size of both pools, after that time."""
        changes = (*self.prefill_changes[1:], *self.decode_changes[1:])
        return sum(at_s >= from_s for at_s, _ in changes)


def _shortest_turn_s(changes: Sequence[tuple[float, int]]) -> float:
    shortest, turned_s, was_up = math.inf, -math.inf, None
    for (_, before), (at_s, after) in pairwise(changes):
        if was_up is not None and (after > before) != was_up:
            shortest, turned_s = min(shortest, at_s - turned_s), at_s
        was_up = after > before
    return shortest


class Fleet:
    """Both pools and the router of one run."""

    def __init__(self, setup: ElasticSetup, begin: Pair) -> None:
        self.setup = setup
        self.world = World(Clock(), PrefixIndex(BLOCK_LEN, setup.worker.block_size), seed=setup.seed)
        workers: dict[str, Worker] = {}

        def pool(letter: str, roles: Roles, chunk: int) -> ElasticPool:
            def make(name: str) -> Worker:
                return Worker(self.world, name, replace(setup.worker, max_num_batched_tokens=chunk), roles)

            return ElasticPool(self.world, make, letter, workers, setup.life)

        self.prefill, self.decode = pool("p", PREFILL, PREFILL_CHUNK), pool("d", DECODE, DECODE_CHUNK)
        self.prefill.begin(begin.prefill)
        self.decode.begin(begin.decode)
        self.router = CountingRouter(self.world, workers, setup.tandem, setup.seed)
        self.router.counts, self.router.targets = Counts(), setup.targets
        self.prefill.routers = [self.router]
        self.decode.routers = [self.router]
        self.max_gpus = 0

    def scale(self, pair: Pair) -> None:
        """Asks for that many workers of each pool."""
        if pair.prefill != self.prefill.replicas:
            self.prefill.scale(pair.prefill)
        if pair.decode != self.decode.replicas:
            self.decode.scale(pair.decode)
        self.look()

    def look(self) -> None:
        """Notes how many GPUs are held now."""
        held = self.prefill.count.num_held + self.decode.count.num_held
        self.max_gpus = max(self.max_gpus, held * self.setup.gpus)

    def play(self, trace: Sequence[TraceRequest], control: Callable[[], None]) -> ElasticOutcome:
        """Calls `control` every tick while requests arrive."""
        requests, clock = from_trace(trace, 1.0, self.world.index), self.world.clock
        end_s = requests[-1].at_s
        held_s: list[float] = []

        def tick() -> None:
            control()
            if clock.now_s + self.setup.tick_s < end_s:
                clock.after(self.setup.tick_s, tick)

        clock.at(0.0, tick)
        for request in requests:
            clock.at(request.at_s, self.router.submit, request)
        clock.at(end_s, lambda: held_s.append(self.prefill.held_s(end_s) + self.decode.held_s(end_s)))
        clock.run()
        good = sum(map(self.setup.targets.met_by, requests))
        return ElasticOutcome(
            requests,
            good / len(requests),
            held_s[0] * self.setup.gpus / 3600,
            self.prefill.use.changes,
            self.decode.use.changes,
            (),
            self.max_gpus,
        )


class Watch:
    """Makes observations from a fleet's counters."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last = Counts()
        self._last_busy_s = 0.0

    def observe(self) -> Observation:
        """The fleet now, and what happened since the call before."""
        fleet, counts, last = self._fleet, self._fleet.router.counts, self._last
        busy_s = fleet.prefill.busy_s
        ready = fleet.decode.workers
        blocks = sum(worker.spec.num_blocks for worker in ready)
        seen = Observation(
            now_s=fleet.world.clock.now_s,
            prefill=fleet.prefill.count,
            decode=fleet.decode.count,
            num_arrived=counts.num_arrived - last.num_arrived,
            num_answered=counts.num_answered - last.num_answered,
            ttft_sum_s=counts.ttft_sum_s - last.ttft_sum_s,
            num_late=counts.num_late - last.num_late,
            num_finished=counts.num_finished - last.num_finished,
            num_slow=counts.num_slow - last.num_slow,
            tpot_sum_s=counts.tpot_sum_s - last.tpot_sum_s,
            queue_len=fleet.router.num_waiting,
            prefill_busy_s=busy_s - self._last_busy_s,
            num_sequences=sum(worker.num_requests for worker in ready),
            decode_kv_share=sum(worker.engine.pool.num_used for worker in ready) / max(1, blocks),
        )
        self._last_busy_s = busy_s
        self._last = replace(counts)
        return seen


def planned(trace: Sequence[TraceRequest], setup: ElasticSetup, begin: Pair, config: PlannerConfig) -> ElasticOutcome:
    """The planner sizes the fleet, which begins with `begin`."""
    fleet, planner = Fleet(setup, begin), Planner(config)
    watch, decisions = Watch(fleet), []

    def control() -> None:
        seen = watch.observe()
        decision = planner.decide(seen)
        if decision.changes:
            decisions.append((seen.now_s, decision))
        target = decision.target
        shrunk = Pair(min(target.prefill, seen.prefill.replicas), min(target.decode, seen.decode.replicas))
        fleet.scale(shrunk)
        fleet.scale(replicas_now(config, target, fleet.prefill.count, fleet.decode.count))

    outcome = fleet.play(trace, control)
    return ElasticOutcome(
        outcome.requests, outcome.attainment, outcome.gpu_hours, outcome.prefill_changes, outcome.decode_changes,
        decisions, outcome.max_gpus,
    )  # fmt: skip


def scheduled(trace: Sequence[TraceRequest], setup: ElasticSetup, plan: Sequence[tuple[float, Pair]]) -> ElasticOutcome:
    """The sizes of `plan`, (time, workers) in order: workers are started early enough to be ready at that time."""
    fleet = Fleet(setup, plan[0][1])
    start_s = setup.life.start_s

    def size_at(time_s: float) -> Pair:
        return next(pair for at_s, pair in reversed(plan) if at_s <= time_s or at_s == plan[0][0])

    def control() -> None:
        now_s = fleet.world.clock.now_s
        now, soon = size_at(now_s), size_at(now_s + start_s)
        fleet.scale(Pair(max(now.prefill, soon.prefill), max(now.decode, soon.decode)))

    return fleet.play(trace, control)
