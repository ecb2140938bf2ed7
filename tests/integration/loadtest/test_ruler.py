"""The load tester against a server that logs what it really did: goodput, counts and gaps."""

from __future__ import annotations

from itertools import islice

import pytest

from loadtest.metrics import inter_token_s, is_good, request_metrics
from loadtest.records import RequestRecord
from loadtest.schedule import Limits, draw_adapters
from loadtest.slo import Slo
from loadtest.summary import summarize
from tests.integration.loadtest.conftest import StartFake
from tests.integration.loadtest.fake_script import Behaviour
from tests.integration.loadtest.load import load

QUICK = Behaviour(messages=((20, 1), (10, 1), (12, 2), (9, 1), (15, 3)))
LATE = Behaviour(messages=((1200, 1), (10, 4), (10, 3)))
SLOW = Behaviour(messages=((20, 1), (500, 1), (500, 1)))
SINGLE = Behaviour(messages=((30, 1),))
SCRIPT = (QUICK, LATE, QUICK, SLOW, SINGLE, QUICK, Behaviour(refuse=429), QUICK, Behaviour(fail_after=0), QUICK)
NUM_GOOD_OF_SCRIPT = 6


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


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_each_conversation_asks_for_the_adapter_that_was_drawn_for_it(start_fake, protocol: str) -> None:
    server, names = start_fake(Behaviour(messages=((1, 1),))), ("a", "b", "c")
    workload = "conversation:system=20,turns=2,input=5,output=1,think=1ms"
    result = await load(
        server.target(protocol), limits=Limits(num_requests=40), workload=workload, adapters=names, adapter_skew=1.0
    )
    truth = server.finish()
    drawn = list(islice(draw_adapters(names, 1.0, result.config.seed), 20))
    assert [truth[record.request_id].model for record in result.records] == [record.model for record in result.records]
    assert {(record.conversation, record.model) for record in result.records} == set(enumerate(drawn))


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
