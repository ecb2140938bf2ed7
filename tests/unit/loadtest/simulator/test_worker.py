"""One worker, or two: times by hand, steps done at once beside steps done one by one, blocks conserved."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.clock import Clock
from loadtest.simulator.fleet import World
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import SimRequest, from_trace
from loadtest.simulator.residuals import lognormal_residuals
from loadtest.simulator.worker import Calls, Progress, Worker
from loadtest.workloads.trace import TraceRequest
from shared.identity import BOTH
from shared.sizing.step_time import StepTimes, StepWork
from tests.examples import examples
from tests.unit.loadtest.simulator.setups import spec

TIMES = StepTimes(fixed_s=1e-3, read_s=4e-3, token_s=1e-4, sequence_s=1e-5, kv_s=1e-7, attention_s=1e-9)


class Fleet:
    """Two workers, and what they tell of their requests."""

    def __init__(self, step_by_step: bool = False, **changes) -> None:
        self.world = World(Clock(), PrefixIndex(512, 16), step_by_step=step_by_step)
        worker = spec(2000, block_size=16, times=TIMES, **changes)
        self.one, self.other = (Worker(self.world, name, worker, BOTH) for name in ("one", "other"))
        self.first: dict[str, float] = {}
        self.done: dict[str, float] = {}
        self.calls = Calls(self._on_first, lambda _: None, self._on_done)

    def _on_first(self, request: SimRequest, _: float, __: int) -> None:
        self.first[request.name] = self.world.clock.now_s

    def _on_done(self, request: SimRequest) -> None:
        self.done[request.name] = self.world.clock.now_s

    def requests(self, *lengths: tuple[float, int, int]) -> list[SimRequest]:
        """(arrival, prompt, answer) each."""
        return from_trace([TraceRequest(*one) for one in lengths], 1.0, self.world.index)

    def hand_over(self, request: SimRequest, *, to: Worker) -> None:
        def reserved(needed: frozenset[int] | None) -> None:
            assert needed is not None
            self.one.submit(request, self.calls, to, needed)

        to.reserve(request, self.calls, reserved)

    def check_empty(self) -> None:
        for worker in (self.one, self.other):
            worker.engine.scheduler.check_integrity()
            assert worker.engine.pool.num_used == 0
            assert worker.num_requests == 0


def test_times_of_one_prompt_and_its_answer_by_hand():
    fleet = Fleet()
    (request,) = fleet.requests((0.0, 100, 4))
    fleet.one.prefill_here(request, fleet.calls)
    fleet.world.clock.run()
    prompt_s = 1e-3 + 100 * 1e-4 + 100 * 101 / 2 * 1e-9  # products take longer than reading
    steps_s = [1e-3 + 4e-3 + 1e-5 + context * 1e-7 for context in (101, 102, 103)]
    message_s = fleet.one.spec.message_s
    assert fleet.first[request.name] == pytest.approx(prompt_s + message_s)
    assert fleet.done[request.name] == pytest.approx(prompt_s + sum(steps_s) + message_s)
    assert fleet.one.engine.num_steps == 4
    fleet.check_empty()


def test_a_hand_over_ships_the_last_chunk_behind_its_step_and_then_decodes_elsewhere():
    fleet = Fleet(max_num_batched_tokens=64)
    (request,) = fleet.requests((0.0, 100, 2))
    fleet.hand_over(request, to=fleet.other)
    fleet.world.clock.run()
    message_s, wire_s = fleet.one.spec.message_s, fleet.one.spec.wire_s
    chunks_s = TIMES.step_s(StepWork().with_chunk(64, 0)) + TIMES.step_s(StepWork().with_chunk(36, 64))
    block_s = 16 * fleet.one.spec.kv_bytes_per_token / fleet.one.spec.link
    assert fleet.first[request.name] == pytest.approx(message_s + chunks_s + message_s)
    joined_s = message_s + chunks_s + 3 * block_s + wire_s  # four blocks went while the second chunk was computed
    assert fleet.done[request.name] == pytest.approx(joined_s + TIMES.decode_step_s(1, 101) + message_s)
    fleet.check_empty()
    assert fleet.other.engine.pool.num_cached == 100 // 16


@pytest.mark.parametrize("plans_ahead", [True, False])
@pytest.mark.parametrize("tpot_target_s", [0.0, 0.008])
def test_steps_done_at_once_are_those_done_one_by_one(plans_ahead, tpot_target_s):
    def play(step_by_step: bool) -> Fleet:
        fleet = Fleet(
            step_by_step,
            plans_ahead=plans_ahead,
            tpot_target_s=tpot_target_s,
            max_num_batched_tokens=128,
            residuals=lognormal_residuals(0.1),
        )
        rng = random.Random(3)
        requests = fleet.requests(
            *sorted((rng.uniform(0, 2), rng.randint(2, 400), rng.randint(1, 120)) for _ in range(60))
        )
        for number, request in enumerate(requests):
            if number % 3:
                fleet.world.clock.at(request.at_s, fleet.one.prefill_here, request, fleet.calls)
            else:
                fleet.world.clock.at(request.at_s, lambda one=request: fleet.hand_over(one, to=fleet.other))
        fleet.world.clock.run()
        fleet.check_empty()
        return fleet

    at_once, one_by_one = play(False), play(True)
    assert at_once.first == pytest.approx(one_by_one.first)
    assert at_once.done == pytest.approx(one_by_one.done)
    for name in ("one", "other"):
        mine, other = getattr(at_once, name).engine, getattr(one_by_one, name).engine
        assert mine.num_steps == other.num_steps
        assert mine.busy_s == pytest.approx(other.busy_s)
        assert sorted(mine.pool.cached_hashes()) == sorted(other.pool.cached_hashes())
    assert at_once.world.clock.num_events < one_by_one.world.clock.num_events


@examples(30)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 300), st.integers(2, 200), st.floats(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
)
def test_answers_that_go_on_elsewhere_end_once_and_leave_no_block(requests, plans_ahead, step_by_step):
    """Each moves at some time, or is left there after all; both workers have it meanwhile."""
    fleet = Fleet(step_by_step, plans_ahead=plans_ahead)
    ends: Counter[str] = Counter()
    counted = Calls(lambda *_: None, lambda _: None, lambda request: ends.update([request.name]))

    def move(request: SimRequest, back: bool) -> None:
        so_far = fleet.one.progress(request.name)
        if so_far is None or so_far.num_tokens == request.num_prompt_tokens:
            return
        assert so_far.num_tokens < request.num_prompt_tokens + request.num_output_tokens
        assert len(so_far.hashes) == (so_far.num_tokens - 1) // 16
        fleet.other.go_on(request, request.name + ".m1", so_far, counted, fleet.one)
        (fleet.other if back else fleet.one).leave(request.name + ".m1" * back)

    asked = fleet.requests(*[(at_s, prompt, answer) for at_s, prompt, answer, _, _ in sorted(requests)])
    for request, (_, _, _, after_s, back) in zip(asked, sorted(requests), strict=True):
        fleet.world.clock.at(request.at_s, fleet.one.prefill_here, request, counted)
        fleet.world.clock.at(request.at_s + after_s, move, request, back)
    fleet.world.clock.run()
    fleet.check_empty()
    assert ends == Counter(request.name for request in asked)


def test_a_moved_answers_blocks_are_fetched_and_the_rest_of_its_tokens_computed():
    fleet = Fleet()
    (request,) = fleet.requests((0.0, 100, 60))
    begun: list[float] = []
    calls = Calls(lambda *_: None, lambda _: begun.append(fleet.world.clock.now_s), fleet.calls.on_done)
    fleet.one.prefill_here(request, fleet.calls)
    found: list[Progress] = []

    def move() -> None:
        so_far = fleet.one.progress(request.name)
        assert so_far is not None
        found.append(so_far)
        fleet.other.go_on(request, "again", so_far, calls, fleet.one)
        fleet.one.leave(request.name)

    fleet.world.clock.at(0.1, move)
    fleet.world.clock.run()
    (so_far,) = found
    link_s = len(so_far.hashes) * 16 * fleet.one.spec.kv_bytes_per_token / fleet.one.spec.link
    num_left = so_far.num_tokens - 16 * len(so_far.hashes)
    step_s = TIMES.step_s(StepWork().with_chunk(num_left, 16 * len(so_far.hashes)))
    wires_s = 2 * fleet.one.spec.wire_s
    assert begun == [pytest.approx(0.1 + wires_s + link_s + step_s + fleet.one.spec.message_s)]
    assert fleet.other.engine.num_steps == request.num_prompt_tokens + 60 - so_far.num_tokens
    fleet.check_empty()


def test_a_command_waits_for_the_step_that_runs_and_for_the_next_where_that_is_planned():
    begun = {}
    for plans_ahead in (True, False):
        fleet = Fleet(plans_ahead=plans_ahead)
        long, short = fleet.requests((0.0, 4000, 2), (0.1, 16, 2))
        fleet.one.prefill_here(long, fleet.calls)
        fleet.world.clock.at(short.at_s, fleet.one.prefill_here, short, fleet.calls)
        fleet.world.clock.run()
        begun[plans_ahead] = fleet.first[short.name] - fleet.first[long.name]
    long_s = TIMES.step_s(StepWork(1, 4001))
    assert begun[True] - begun[False] > 0.9 * long_s


def test_reservations_without_room_are_refused_and_those_in_turn_wait():
    fleet = Fleet()
    big, other, last = fleet.requests((0.0, 20_000, 3), (0.0, 20_000, 3), (0.0, 30_000, 3))
    answers: list[frozenset[int] | None] = []
    fleet.other.reserve(big, fleet.calls, lambda needed: fleet.one.submit(big, fleet.calls, fleet.other, needed))
    fleet.other.reserve(other, fleet.calls, answers.append)
    fleet.one.submit(last, fleet.calls, fleet.other, None)
    fleet.world.clock.run()
    assert answers == [None]
    assert set(fleet.done) == {big.name, last.name}
    fleet.check_empty()


def test_reports_say_what_the_scheduler_holds():
    fleet = Fleet(tpot_target_s=0.02)
    reports = []
    fleet.world.listeners.append(
        type("Router", (), {"on_report": lambda _, worker, report: reports.append((worker, report))})()
    )
    (request,) = fleet.requests((0.0, 100, 400))
    fleet.one.prefill_here(request, fleet.calls)
    fleet.world.clock.run()
    during = [report for worker, report in reports if worker == "one" and report.decoding.num_sequences]
    assert len(during) > 5, "also while steps are done at once"
    assert all(report.num_running == 1 and report.least_slack_s is not None for report in during)
    contexts = [report.decoding.num_context_tokens for report in during]
    assert contexts == sorted(contexts)
    assert contexts[-1] > contexts[0] + 100
    assert during[-1].step_times is None, "nobody asked for them"
    last = reports[-1][1]
    assert (last.num_free_blocks, last.num_running, last.num_waiting) == (2000, 0, 0)
    fleet.check_empty()
