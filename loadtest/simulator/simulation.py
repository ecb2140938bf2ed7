"""One run: a trace, a fleet, a policy, a seed. The same arguments give the same result."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from loadtest.simulator.clock import Clock
from loadtest.simulator.fleet import WorkerSpec, World
from loadtest.simulator.outcome import Outcome, Targets, summarize
from loadtest.simulator.peers import PEERS, PeerRouter
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import SimRequest, from_trace
from loadtest.simulator.router import SimRouter
from loadtest.simulator.tandem_router import TandemConfig, TandemRouter
from loadtest.simulator.worker import Worker
from loadtest.workloads.trace import TraceRequest
from shared.errors import ConfigError
from shared.identity import BOTH, DECODE, PREFILL, Roles, WorkerRole

TANDEM, STATIC, COLLOCATED, AUTO = "tandem", "static", "collocated", "auto"
"""Tandem's router as it is set; over two pools whose decode workers compute no prompts; over one pool in which every
prompt is computed where it is answered; and over one pool with a choice for each request."""
POLICIES = (*PEERS, TANDEM, STATIC, COLLOCATED, AUTO)


@dataclass(frozen=True, slots=True)
class Group:
    """Workers of one kind."""

    count: int
    worker: WorkerSpec
    roles: Roles = BOTH

    @property
    def letter(self) -> str:
        """Their names begin with it."""
        return {PREFILL: "p", DECODE: "d"}.get(self.roles, "w")


@dataclass(frozen=True, slots=True)
class Setup:
    """The fleet, its targets and its routers."""

    groups: Sequence[Group]
    targets: Targets
    num_routers: int = 1
    only_router: int | None = None
    """The replica that gets all requests; None: they are assigned at random."""
    peers_refuse: bool = False
    """Peers also refuse requests that they predict to be late."""
    tandem: TandemConfig = field(default_factory=TandemConfig)
    seed: int = 0
    step_by_step: bool = False
    """See `Engine`."""
    edge_s: Sequence[float] = ()
    """From a request's arrival until its router can place it, drawn from these; empty: no time."""

    @property
    def worker(self) -> WorkerSpec:
        """A worker of the first group."""
        return self.groups[0].worker


def two_pools(num_prefills: int, num_decodes: int, worker: WorkerSpec, decode: WorkerSpec | None = None) -> list[Group]:
    """Workers that only prefill beside workers that only decode; without the former these compute all prompts."""
    pools = [Group(num_prefills, worker, PREFILL), Group(num_decodes, decode or worker, DECODE)]
    return [pool for pool in pools if pool.count]


def simulate(trace: Sequence[TraceRequest], speedup: float, policy: str, setup: Setup) -> Outcome:
    """Replays the trace `speedup` times as fast; `policy` is one of POLICIES."""
    begin = time.perf_counter()
    requests = play(trace, speedup, policy, setup)
    return summarize(policy, requests, setup.targets, time.perf_counter() - begin)


def play(
    trace: Sequence[TraceRequest],
    speedup: float,
    policy: str,
    setup: Setup,
    adapters: Sequence[str] = (),
    workers: dict[str, Worker] | None = None,
) -> list[SimRequest]:
    """The requests with their results. `adapters`: of each request, empty names for the base model; none: of none.
    `workers` gets the workers by name, for what is to be read from them afterwards."""
    _check_room(trace, setup)
    block_size = setup.worker.block_size
    if trace[0].hash_ids and trace[0].block_len % block_size:
        raise ConfigError(
            f"an id of the trace stands for {trace[0].block_len} tokens, no multiple of a block's {block_size}",
            field="trace", limit=block_size, value=trace[0].block_len,
        )  # fmt: skip
    index = PrefixIndex(trace[0].block_len, block_size)
    world = World(
        Clock(),
        index,
        setup.step_by_step,
        setup.seed,
        reports_times=policy == AUTO,
        adapters=sorted({*adapters} - {""}),
    )
    workers = {} if workers is None else workers
    for group in setup.groups:
        for _ in range(group.count):
            name = f"{group.letter}{sum(worker.roles == group.roles for worker in workers.values())}"
            workers[name] = Worker(world, name, group.worker, group.roles)

    has_prefills = any(WorkerRole.PREFILL in group.roles for group in setup.groups)
    tandem = replace(setup.tandem, mode="auto" if policy == AUTO else "disaggregated" if has_prefills else "collocated")

    def router(number: int) -> SimRouter:
        seed = setup.seed * 1000 + number
        if policy not in PEERS:
            return TandemRouter(world, workers, tandem, seed, number, setup.num_routers)
        deadline_s = setup.targets.ttft_s if setup.peers_refuse else None
        return PeerRouter(world, workers, PEERS[policy](seed), deadline_s)

    routers = [router(number) for number in range(setup.num_routers)]
    requests = from_trace(trace, speedup, world.index)
    for request, adapter in zip(requests, adapters, strict=bool(adapters)):
        request.adapter = adapter
    rng, edge = random.Random(setup.seed), random.Random(f"{setup.seed}/edge")
    for request in requests:
        world.clock.at(
            request.at_s + (edge.choice(setup.edge_s) if setup.edge_s else 0.0),
            (rng.choice(routers) if setup.only_router is None else routers[setup.only_router]).submit,
            request,
        )
    world.clock.run()
    for request in requests:
        assert request.refused or request.finished_s > 0, f"request {request.name} never ended"
    for worker in workers.values():
        worker.engine.scheduler.check_integrity()
        worker.adapters.check_unused()
        assert not worker.num_requests, f"{worker.name} holds {worker.num_requests} requests"
        assert not worker.engine.pool.num_used, f"{worker.name} lost {worker.engine.pool.num_used} blocks"
    return requests


def _check_room(requests: Sequence[TraceRequest], setup: Setup) -> None:
    """Raises ConfigError for a request that fills more than a whole worker: a real one refuses it."""
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
    room = min(group.worker.num_blocks * group.worker.block_size for group in setup.groups)
    if longest > room:
        raise ConfigError(
            f"the longest request takes {longest} tokens, a worker's blocks hold {room}", field="blocks", limit=room
        )
