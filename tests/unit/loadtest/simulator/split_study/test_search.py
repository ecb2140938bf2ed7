"""The search finds the best fixed system where goodput has one height, and says what it left out."""

from __future__ import annotations

import pytest

from loadtest.simulator.outcome import Targets
from loadtest.simulator.simulation import COLLOCATED, STATIC
from loadtest.simulator.split_study import search as searching
from loadtest.simulator.split_study.search import Search, capacity, likely_rate
from loadtest.simulator.split_study.systems import CHUNKS, Pool, Run, System
from loadtest.workloads.trace import TraceRequest
from shared.identity import DECODE, PREFILL
from shared.sizing.devices import GPUS
from shared.sizing.roofline import roofline
from shared.sizing.shapes import LLAMA_3_8B
from tests.unit.loadtest.simulator.setups import spec

TARGETS = Targets(1.0, 0.025)
FAST = spec(times=roofline(LLAMA_3_8B, GPUS["H100"], 1))
SLOW = spec(times=roofline(LLAMA_3_8B, GPUS["L40S"], 1))
REQUESTS = [TraceRequest(float(number), 1000, 300) for number in range(10)]


def searched(monkeypatch, goodput_of, workers=(FAST,) * 16) -> Search:
    """A search whose runs give what `goodput_of` says, of 100 requests/s."""

    def run(system: System, *_: object) -> Run:
        return Run(system.name, 100.0, goodput_of(system), 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(searching, "run", run)
    return Search(Pool(workers), TARGETS, REQUESTS)


@pytest.mark.parametrize("height", range(1, 16))
def test_the_best_split_is_found_wherever_it_lies(monkeypatch, height):
    def goodput_of(system: System) -> float:
        return 80.0 - abs(system.num_prefills - height) if system.policy == STATIC else 1.0

    search = searched(monkeypatch, goodput_of)
    assert search.best() == System(STATIC, height)
    assert search.num_left_out == 15 + len(CHUNKS) - len(search.fixed)
    assert search.num_left_out > 0


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_best_chunk_is_found_too(monkeypatch, chunk):
    def goodput_of(system: System) -> float:
        if system.policy == STATIC:
            return 50.0
        return 90.0 - 5 * abs(CHUNKS.index(system.chunk) - CHUNKS.index(chunk))

    assert searched(monkeypatch, goodput_of).best() == System(COLLOCATED, chunk=chunk)


def test_nothing_more_is_tried_where_nearly_all_requests_are_in_time(monkeypatch):
    search = searched(monkeypatch, lambda _: 99.9)
    search.best()
    assert len(search.runs) == 1


def test_with_two_speeds_either_kind_may_prefill_first(monkeypatch):
    def goodput_of(system: System) -> float:
        return 60.0 + 10 * system.slow_first - abs(system.num_prefills - 5)

    search = searched(monkeypatch, goodput_of, [FAST] * 8 + [SLOW] * 8)
    best = search.best()
    assert best == System(STATIC, 5, slow_first=True)
    setup = Pool([FAST, SLOW]).setup(System(STATIC, 1, slow_first=True), TARGETS)
    assert [(group.roles, group.worker.times) for group in setup.groups] == [
        (PREFILL, SLOW.times),
        (DECODE, FAST.times),
    ]


def test_the_capacity_is_the_rate_up_to_which_the_best_system_serves_nine_in_ten(monkeypatch):
    def run(system: System, _: Pool, __: Targets, requests: list[TraceRequest]) -> Run:
        offered = requests[0].at_s
        return Run(system.name, offered, min(offered, 33.0 if system.policy == STATIC else 20.0), 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(searching, "run", run)
    pool = Pool([FAST] * 4)
    rate, starts = capacity(pool, TARGETS, lambda rate: [TraceRequest(rate, 1000, 300)], most_runs=12)
    assert 0.88 * 33 / 0.9 < rate <= 33 / 0.9
    assert {system.policy for system in starts} == {STATIC, COLLOCATED}
    assert likely_rate(pool, TARGETS, REQUESTS) > 4 * likely_rate(Pool([SLOW]), TARGETS, REQUESTS)
