"""Answers that move in the simulated fleet: each ends once, where its router knows it to be, and leaves no block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.clock import Clock
from loadtest.simulator.fleet import World
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import from_trace
from loadtest.simulator.tandem_router import TandemConfig, TandemRouter
from loadtest.simulator.worker import Worker
from loadtest.workloads.trace import TraceRequest
from services.router.placement.policy import PlacementConfig
from services.router.placement.split import SETTLED_S, Split
from shared.sizing.step_time import StepTimes
from tests.examples import examples
from tests.unit.loadtest.simulator.setups import spec

TIMES = StepTimes(fixed_s=1e-3, read_s=4e-3, token_s=1e-4, sequence_s=1e-5, kv_s=1e-7, attention_s=1e-9)


@examples(20)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=12),
    st.lists(st.tuples(st.floats(0.1, 4), st.sets(st.sampled_from(["w0", "w1", "w2"]))), max_size=4),
    st.booleans(),
)
def test_whatever_is_vacated_and_when_each_answer_ends_and_no_commitment_or_block_is_left(asked, vacated, plans_ahead):
    world = World(Clock(), PrefixIndex(512, 16), reports_times=True)
    worker = spec(2000, block_size=16, times=TIMES, tpot_target_s=0.05, plans_ahead=plans_ahead)
    workers = {f"w{n}": Worker(world, f"w{n}", worker) for n in range(3)}
    config = TandemConfig(mode="auto", ttft_target_s=100.0, placement=PlacementConfig(tpot_target_s=0.05))
    router = TandemRouter(world, workers, config, 0)
    split = router.split

    def vacate(names: set[str]) -> None:
        split.split = Split(frozenset(workers) - names, 1.0)
        split._left = dict.fromkeys(names, world.clock.now_s - SETTLED_S)
        router.changed()

    split._next_s = float("inf")
    requests = from_trace([TraceRequest(*one) for one in sorted(asked)], 1.0, world.index)
    for request in requests:
        world.clock.at(request.at_s, router.submit, request)
    for at_s, names in vacated:
        world.clock.at(at_s, vacate, names)
    world.clock.run()
    for request in requests:
        assert request.finished_s > request.at_s
    for name, one in workers.items():
        one.engine.scheduler.check_integrity()
        assert (one.num_requests, one.engine.pool.num_used, router.ledger(name).num_open) == (0, 0, 0)


def test_an_answer_leaves_a_worker_that_is_wanted_for_prompts_without_a_pause():
    world = World(Clock(), PrefixIndex(512, 16), reports_times=True)
    worker = spec(2000, block_size=16, times=TIMES, tpot_target_s=0.05)
    workers = {f"w{n}": Worker(world, f"w{n}", worker) for n in range(2)}
    config = TandemConfig(mode="auto", ttft_target_s=100.0, placement=PlacementConfig(tpot_target_s=0.05))
    router = TandemRouter(world, workers, config, 0)
    (request,) = from_trace([TraceRequest(0.0, 100, 400)], 1.0, world.index)
    placed: list[str] = []

    def vacate() -> None:
        placed.append(request.decode)
        router.split.split = Split(frozenset(workers) - {request.decode}, 1.0)
        router.split._left, router.split._next_s = {request.decode: -SETTLED_S}, float("inf")
        router.changed()

    router.submit(request)
    world.clock.at(0.5, vacate)
    world.clock.run()
    assert router.mover is not None
    assert router.mover.num_moved == 1
    assert request.decode not in placed
    alone_s = sum(TIMES.decode_step_s(1, 100 + number) for number in range(1, 400))
    assert request.tpot_s * 399 < alone_s + 0.02, "both workers have it until the new one writes"
