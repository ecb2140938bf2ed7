"""One run: a trace, a fleet, a policy, a seed. The same arguments give the same result."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.simulator.clock import Clock
from loadtest.simulator.decode_worker import DecodeWorker
from loadtest.simulator.fleet import WorkerSpec, World
from loadtest.simulator.outcome import Outcome, Targets, summarize
from loadtest.simulator.peers import PEERS, PeerRouter
from loadtest.simulator.prefill_worker import PrefillWorker
from loadtest.simulator.prefix_cache import PrefixIndex
from loadtest.simulator.request import SimRequest, from_trace
from loadtest.simulator.router import SimRouter
from loadtest.simulator.tandem_router import TandemConfig, TandemRouter
from loadtest.workloads.trace import TraceRequest

POLICIES = (*PEERS, "tandem")


@dataclass(frozen=True, slots=True)
class Setup:
    """The fleet, its targets and its routers."""

    worker: WorkerSpec
    """Of both pools, but for `decode`."""
    num_prefills: int
    num_decodes: int
    targets: Targets
    num_routers: int = 1
    only_router: int | None = None
    """The replica that gets all requests; None: they are assigned at random."""
    peers_refuse: bool = False
    """Peers also refuse requests that they predict to be late."""
    tandem: TandemConfig = field(default_factory=TandemConfig)
    seed: int = 0
    decode: WorkerSpec | None = None
    """Of decode workers, where they are unlike `worker`."""


def simulate(trace: Sequence[TraceRequest], speedup: float, policy: str, setup: Setup) -> Outcome:
    """Replays the trace `speedup` times as fast; `policy` is one of POLICIES."""
    begin = time.perf_counter()
    requests = play(trace, speedup, policy, setup)
    return summarize(policy, requests, setup.targets, time.perf_counter() - begin)


def play(trace: Sequence[TraceRequest], speedup: float, policy: str, setup: Setup) -> list[SimRequest]:
    """The requests with their results."""
    world = World(Clock(), PrefixIndex(setup.worker.run_len), setup.worker, setup.decode)
    prefills = {f"p{n}": PrefillWorker(world, f"p{n}") for n in range(setup.num_prefills)}
    decodes = {f"d{n}": DecodeWorker(world, f"d{n}") for n in range(setup.num_decodes)}

    def router(number: int) -> SimRouter:
        seed = setup.seed * 1000 + number
        if policy == "tandem":
            return TandemRouter(world, prefills, decodes, setup.tandem, seed, number, setup.num_routers)
        deadline_s = setup.targets.ttft_s if setup.peers_refuse else None
        return PeerRouter(world, prefills, decodes, PEERS[policy](seed), deadline_s)

    routers = [router(number) for number in range(setup.num_routers)]
    requests = from_trace(trace, speedup)
    rng = random.Random(setup.seed)
    for request in requests:
        world.clock.at(
            request.at_s,
            (rng.choice(routers) if setup.only_router is None else routers[setup.only_router]).submit,
            request,
        )
    world.clock.run()
    for request in requests:
        assert request.refused or request.finished_s > 0, f"request {request.name} never ended"
    return requests
