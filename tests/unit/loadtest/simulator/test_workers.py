"""Simulated workers keep the arithmetic of real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulator.clock import Clock
from loadtest.simulator.decode_worker import DecodeWorker
from loadtest.simulator.fleet import World
from loadtest.simulator.prefill_worker import PrefillCalls, PrefillWorker
from loadtest.simulator.prefix_cache import PrefixCache
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import SimRequest, from_trace
from loadtest.workloads.trace import TraceRequest
from shared.sizing.devices import H200
from shared.sizing.shapes import LLAMA_3_70B
from shared.sizing.spread import Spread
from shared.sizing.step_time import step_times
from tests.unit.loadtest.simulator.setups import spec


def world(**changes) -> World:
    return World(Clock(), PrefixIndex(512), replace(spec(), message_s=0.0, **changes))


def request(name: str, num_prompt: int = 1000, num_output: int = 10, runs=None) -> SimRequest:
    number = int(name[1:])
    return SimRequest(name, 0.0, num_prompt, num_output, runs or (number * 100, number * 100 + 1), "s")


def test_a_lone_request_decodes_in_the_sum_of_its_steps():
    here = world()
    worker = DecodeWorker(here, "d0")
    one = request("r1", 1000, 50)
    assert worker.try_reserve(one)
    here.clock.at(1.0, worker.join, one, lambda _: None)
    here.clock.run()
    expected = sum(here.spec.times.decode_step_s(1, 1001 + step) for step in range(49))
    assert one.finished_s == pytest.approx(1.0 + expected, rel=1e-9)
    assert worker.cache.num_used == worker.num_requests == 0


@pytest.mark.parametrize("spread", [None, Spread(4, 3)], ids=["one", "three-stages"])
@settings(max_examples=30)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 20_000).map(lambda n: n * 1e-4), st.integers(1, 3000), st.integers(1, 40)),
        max_size=8,
        unique_by=lambda one: one[0],
    )
)
def test_jumping_over_steps_gives_what_stepping_gives(spread, arrivals):
    """Against a worker that really does one step after the other."""
    here = world() if spread is None else world(times=step_times(LLAMA_3_70B, H200, spread))
    worker = DecodeWorker(here, "d0")
    requests = []
    for number, (at_s, num_prompt, num_output) in enumerate(arrivals):
        one = request(f"r{number}", num_prompt, num_output)
        requests.append((at_s, one))
        assert worker.try_reserve(one)
        here.clock.at(at_s, worker.join, one, lambda _: None)
    here.clock.run()
    times, now_s, waiting, running = here.spec.times, 0.0, sorted(requests, key=lambda r: r[0]), {}
    finished = {one.name: at_s for at_s, one in requests if one.num_output_tokens == 1}
    waiting = [(at_s, one) for at_s, one in waiting if one.num_output_tokens > 1]
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s + 1e-12:
            one = waiting.pop(0)[1]
            running[one.name] = [one.num_prompt_tokens + 1, one.num_output_tokens - 1]
        now_s += times.decode_step_s(len(running), sum(kv for kv, _ in running.values()))
        for name in list(running):
            running[name][0] += 1
            running[name][1] -= 1
            if not running[name][1]:
                finished[name] = now_s
                del running[name]
    assert len(finished) == len(requests)
    for _, one in requests:
        assert one.finished_s == pytest.approx(finished[one.name], abs=1e-6)


def test_a_prompt_prefilled_here_slows_the_batch_and_then_joins_it():
    here = world()
    worker = DecodeWorker(here, "d0")
    old, new = request("r1", 1000, 40), request("r2", 2000, 5)
    firsts = []
    for one in (old, new):
        assert worker.try_reserve(one)
    worker.join(old, lambda _: None)
    here.clock.at(0.05, worker.prefill_here, new, lambda one, at_s, took_s: firsts.append((one.name, took_s)), print)
    here.clock.run()
    assert firsts[0][0] == "r2"
    assert firsts[0][1] > here.spec.times.chunk_s(2000, 0)
    alone = sum(here.spec.times.decode_step_s(1, 1001 + step) for step in range(39))
    assert old.finished_s > alone + here.spec.times.chunk_s(2000, 0)
    assert worker.report().num_queued_tokens == 0


def test_reservations_wait_in_line_for_room():
    here = world(num_blocks=100)
    worker = DecodeWorker(here, "d0")
    first, second = request("r1", 1024, 100), request("r2", 1024, 100)
    granted = []
    worker.reserve(first, lambda: granted.append("r1"))
    worker.reserve(second, lambda: granted.append("r2"))
    assert granted == ["r1"]
    worker.join(first, lambda _: None)
    here.clock.run()
    assert granted == ["r1", "r2"]


def test_a_prefill_worker_takes_the_prefix_that_it_holds_and_ships_beside_computing():
    here = world()
    worker = PrefillWorker(here, "p0")
    log = []
    calls = PrefillCalls(
        lambda one: log.append(("start", one.name)),
        lambda one, at_s, took_s: log.append(("first", one.name, at_s)),
        lambda one: log.append(("shipped", one.name, here.clock.now_s)),
    )
    first = request("r1", 20_000, runs=tuple(range(40)))
    again = request("r2", 20_000, runs=(*range(20), *range(900, 920)))
    worker.submit(first, 0, calls)
    here.clock.run()
    times = here.spec.times
    expected = 3 * times.chunk_fixed_s + times.chunk_s(20_000, 0)
    assert log[1][2] == pytest.approx(expected, rel=1e-6)
    last_chunk_s = (20_000 - 2 * 8192) * here.spec.kv_bytes_per_token / here.spec.link
    assert log[2][2] - log[1][2] == pytest.approx(last_chunk_s, rel=1e-6)
    worker.submit(again, 0, calls)
    assert worker.report().num_queued_tokens == 20_000 - 20 * 512
    here.clock.run()
    assert again.num_cached_tokens == 20 * 512
    assert worker.report().num_queued_tokens == 0


def test_prompts_of_one_step_follow_each_other_through_the_stages():
    here = world(times=step_times(LLAMA_3_70B, H200, Spread(4, 2)))
    worker = PrefillWorker(here, "p0")
    ends = []
    calls = PrefillCalls(lambda _: None, lambda _, at_s, __: ends.append(at_s), lambda _: None)
    for name in ("r0", "r1", "r2"):
        worker.submit(request(name), 0, calls)
    here.clock.run()
    times = here.spec.times
    one_s, two_s = times.prefill_step_s(times.chunk_s(1000, 0)), times.prefill_step_s(2 * times.chunk_s(1000, 0), 2)
    assert ends == pytest.approx([one_s, one_s + two_s, one_s + two_s])
    assert one_s < two_s < 2 * one_s


def test_a_decode_worker_has_its_own_blocks_and_times():
    own = replace(spec(500), message_s=0.0, times=step_times(LLAMA_3_70B, H200, Spread(2, 2)))
    here = replace(world(), own_decode_spec=own)
    worker = DecodeWorker(here, "d0")
    one = request("r1", 1000, 50)
    assert worker.try_reserve(one)
    worker.join(one, lambda _: None)
    here.clock.run()
    assert one.finished_s == pytest.approx(sum(own.times.decode_step_s(1, 1001 + step) for step in range(49)))
    assert (worker.cache.num_blocks, PrefillWorker(here, "p0").cache.num_blocks) == (500, here.spec.num_blocks)


steps = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 40), st.booleans()), max_size=30
)


@given(steps)
def test_a_cache_never_holds_more_than_its_blocks_and_tells_the_index_everything(script):
    known: set[int] = set()
    cache = PrefixCache(40, 16, 64, known.add, known.remove)
    held = []
    for path, more, release in script:
        runs = tuple(hash(tuple(path[: i + 1])) for i in range(len(path)))
        if cache.acquire(runs, 64 * len(runs), more):
            cache.seal(runs)
            held.append((runs, more))
        if release and held:
            cache.release(*held.pop(0))
        assert 0 <= cache.num_used <= 40
        assert cache.num_used + cache._num_unused <= 40
        assert known == cache._sealed
    for one in held:
        cache.release(*one)
    assert cache.num_used == 0


def test_the_least_recently_used_prompt_is_evicted_from_its_end():
    gone: list[int] = []
    cache = PrefixCache(12, 16, 64, lambda run: None, gone.append)
    for runs in ((1, 2), (3,)):
        assert cache.acquire(runs, 64 * len(runs), 0)
        cache.seal(runs)
        cache.release(runs, 0)
    assert cache.acquire((4,), 64, 0)
    assert gone == [2]
    assert cache.num_hit_tokens((1, 2), 128) == 64


def test_the_index_counts_only_prefixes_without_a_gap():
    index = PrefixIndex(512)
    for run in (1, 2, 3):
        index.add(run, "a")
    index.add(1, "b")
    index.add(3, "b")
    hits = index.match((1, 2, 3, 4), 1700)
    assert hits.local == {"a": 1536, "b": 512}
    assert hits.peer == 1536
    assert hits.holders == ("a",)


def test_turns_of_a_conversation_share_a_session_and_a_common_system_prompt_does_not():
    lines = [(0, 1, 2), (0, 3, 4), (0, 1, 2, 5), (0, 3, 4, 6), (7,)]
    trace = [TraceRequest(0.0, 512 * len(ids), 10, ids) for ids in lines]
    assert [one.session for one in from_trace(trace, 1.0)] == ["s0", "s1", "s0", "s1", "s4"]
