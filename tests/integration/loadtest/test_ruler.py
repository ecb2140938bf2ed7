"""The ruler against a server that logs when it really did what: every metric within 2 ms, goodput exact.

The truth is the server's own log on the same clock, so a late timer of the server is no error of the ruler. What
remains is the way from one process to another. A busy machine makes both wait for a core; so they ask for priority.
Where they do not get it and no run was free of waits, which Linux counts, two milliseconds cannot be told, and the test
is skipped rather than passed or failed.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from loadtest.config import Traffic
from loadtest.metrics import inter_token_s, is_good, request_metrics
from loadtest.records import RequestRecord
from loadtest.run import RunResult
from loadtest.schedule import Limits
from loadtest.slo import Slo
from loadtest.summary import summarize
from tests.integration.loadtest.conftest import StartFake
from tests.integration.loadtest.fake_script import Behaviour, Truth
from tests.integration.loadtest.load import load
from tests.integration.loadtest.priority import first_in_line

TOLERANCE_MS = 2.0
BUSY_MS = 0.1
"""On an idle machine the wait for a core is some hundredths of this."""
QUICK = Behaviour(messages=((20, 1), (10, 1), (12, 2), (9, 1), (15, 3)))
LATE = Behaviour(messages=((1200, 1), (10, 4), (10, 3)))
SLOW = Behaviour(messages=((20, 1), (500, 1), (500, 1)))
SINGLE = Behaviour(messages=((30, 1),))
SCRIPT = (QUICK, LATE, QUICK, SLOW, SINGLE, QUICK, Behaviour(refuse=429), QUICK, Behaviour(fail_after=0), QUICK)
NUM_GOOD_OF_SCRIPT = 6

STATISTICS = {
    "mean": np.mean,
    "p50": np.median,
    "p90": partial(np.percentile, q=90),
    "p95": partial(np.percentile, q=95),
    "p99": partial(np.percentile, q=99),
}


class Waits(NamedTuple):
    """How long a process has waited for a core since it started, and how many times it got one."""

    total_ms: float
    count: int

    @staticmethod
    def of(pid: int) -> Waits:
        """As the kernel counts, all threads together: gRPC's own hand over what they read."""
        rows = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return Waits(sum(int(waited_ns) for _, waited_ns, _ in rows) / 1e6, sum(int(count) for _, _, count in rows))

    def since(self, start: Waits) -> float:
        """Mean wait in ms."""
        return (self.total_ms - start.total_ms) / max(self.count - start.count, 1)


def errors_ms(result: RunResult, truth: dict[str, Truth]) -> dict[str, float]:
    """How far each figure of the summary is from the same figure of the server's log."""
    summary = summarize(result)
    answered = [truth[record.request_id] for record in result.records if record.ok]
    assert len(answered) == 24
    true_values = {
        "ttft": [t.ttft_s for t in answered],
        "tpot": [t.tpot_s for t in answered if sum(t.counts) > 1],
        "itl": [gap for t in answered for gap in t.gaps_s()],
        "e2el": [t.e2e_s for t in answered],
    }
    return {
        f"{name}_{metric}_ms": abs(summary[f"{name}_{metric}_ms"] - statistic(np.array(values)) * 1e3)
        for metric, values in true_values.items()
        for name, statistic in STATISTICS.items()
    }


@pytest.mark.timing
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_every_metric_is_within_two_milliseconds_of_the_truth(start_fake: StartFake, protocol: str) -> None:
    least_wait_ms = float("inf")
    closest: dict[str, float] = {}
    for seed in range(5):
        server = start_fake(*SCRIPT)
        pids = (os.getpid(), server.pid)
        traffic = Traffic(arrivals="constant", rate=40)
        with first_in_line(*pids):
            before = [Waits.of(pid) for pid in pids]
            result = await load(server.target(protocol), seed=seed, traffic=traffic, limits=Limits(num_requests=30))
        waits = [Waits.of(pid).since(start) for pid, start in zip(pids, before, strict=True)]
        least_wait_ms = min(least_wait_ms, max(waits))
        for name, error in errors_ms(result, server.finish()).items():
            closest[name] = min(error, closest.get(name, error))
        if max(closest.values()) <= TOLERANCE_MS:
            break
    assert len(closest) == 20
    too_far = {name: error for name, error in closest.items() if error > TOLERANCE_MS}
    if too_far and least_wait_ms > BUSY_MS:
        pytest.skip(f"the machine is busy: a process waits {least_wait_ms:.2f} ms each time it wakes up")
    assert too_far == {}


@pytest.mark.timing
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_goodput_is_exactly_the_share_scripted_to_meet_the_targets(start_fake: StartFake, protocol: str) -> None:
    server = start_fake(*SCRIPT)
    # Far from what is scripted on either side: no stall of the machine makes a good request a miss.
    result = await load(server.target(protocol), slo=Slo(0.7, 0.3), limits=Limits(num_requests=40))
    summary = summarize(result)
    assert summary["good"] == 4 * NUM_GOOD_OF_SCRIPT
    assert summary["attainment"] == NUM_GOOD_OF_SCRIPT / len(SCRIPT)
    assert summary["goodput"] == pytest.approx(20 * NUM_GOOD_OF_SCRIPT / len(SCRIPT))
    assert summary["failures"] == {"overloaded": 4, "server_error": 4}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_counts_gaps_and_the_servers_own_account_are_taken_over(start_fake: StartFake, protocol: str) -> None:
    server = start_fake(Behaviour(messages=((5, 2), (5, 1), (5, 4)), cached_tokens=16))
    result = await load(server.target(protocol), limits=Limits(num_requests=3))
    truth = server.finish()
    for record in result.records:
        expected = truth[record.request_id]
        assert record.reply.token_counts == [2, 1, 4]
        assert record.reply.num_output_tokens == 7
        assert record.reply.num_prompt_tokens == len(expected.prompt) == 20
        assert record.reply.num_cached_tokens == 16
        assert len(inter_token_s(record)) == 6
        assert record.reply.split is not None
        assert record.reply.split.ttft_ms == pytest.approx(expected.ttft_s * 1e3, abs=0.01)
        assert record.reply.decode_worker == "d0"
        assert expected.max_tokens == 8


async def test_a_server_without_token_ids_is_timed_by_its_usage(start_fake: StartFake) -> None:
    server = start_fake(Behaviour(messages=((10, 1), (40, 4))), token_ids=False)
    result = await load(server.http, limits=Limits(num_requests=4))
    summary = summarize(result)
    assert (summary["token_counts_exact"], summary["total_output_tokens"]) == (False, 20)
    assert all(good_tpot(record) for record in result.records)


def good_tpot(record: RequestRecord) -> bool:
    found = request_metrics(record)
    assert found is not None
    assert found.tpot_s is not None
    first_s, last_s = record.reply.token_times_s
    return found.tpot_s == pytest.approx((last_s - first_s) / 4) and is_good(record, Slo(None, 0.05))
