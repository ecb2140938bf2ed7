"""Open loop, closed loop, conversations; and what happens to the prompts."""

from __future__ import annotations

import pytest

from loadtest.config import Traffic
from loadtest.records import FailureCause
from loadtest.schedule import Limits
from loadtest.summary import summarize
from loadtest.workloads.tokens import Span, TokenSource
from tests.integration.loadtest.conftest import StartFake
from tests.integration.loadtest.fake_script import Behaviour
from tests.integration.loadtest.load import CONFIG, load

HALF_A_SECOND = Behaviour(messages=((400, 1), (100, 1)))


@pytest.mark.slow
async def test_an_open_loop_sends_on_time_whether_or_not_answers_came(start_fake: StartFake) -> None:
    server = start_fake(HALF_A_SECOND)
    result = await load(server.http, traffic=Traffic(arrivals="constant", rate=50), limits=Limits(num_requests=25))
    sent = [record.reply.sent_s or 0.0 for record in result.records]
    assert sent[-1] < 0.6, "one at a time would take 12 s"
    assert summarize(result)["max_concurrent_requests"] >= 20
    assert all(record.lag_s >= -0.0005 for record in result.records if record.lag_s is not None)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_closed_loop_keeps_so_many_users_busy(start_fake: StartFake, protocol: str) -> None:
    server = start_fake(Behaviour(messages=((30, 1), (30, 1))))
    result = await load(server.target(protocol), traffic=Traffic(concurrency=3), limits=Limits(num_requests=12))
    summary = summarize(result)
    assert summary["max_concurrent_requests"] == 3
    assert (summary["completed"], summary["schedule_lag_ms"], summary["max_concurrency"]) == (12, None, 3)
    assert result.duration_s > 4 * 0.06


@pytest.mark.slow
async def test_a_closed_loop_ends_with_its_time_and_awaits_the_last_answers(start_fake: StartFake) -> None:
    server = start_fake(Behaviour(messages=((120, 1),)))
    result = await load(server.http, traffic=Traffic(concurrency=2), limits=Limits(duration_s=0.5))
    assert all(record.ok for record in result.records)
    assert 8 <= len(result.records) <= 10


@pytest.mark.slow
async def test_a_conversation_continues_with_the_servers_own_tokens(start_fake: StartFake) -> None:
    server = start_fake(Behaviour(messages=((5, 2), (5, 1))))
    result = await load(
        server.grpc,
        workload="conversation:system=6,turns=3,input=4,output=3,think=20ms",
        traffic=Traffic(concurrency=1),
        limits=Limits(num_requests=3),
        num_warmup=0,
    )
    truth = server.finish()
    prompts = [truth[record.request_id].prompt for record in result.records]
    tokens = TokenSource(CONFIG.seed)
    opening = tokens.prompt([Span("system", 6), Span("chat/0/0", 4)])
    second = [*opening, 7, 7, 8, *tokens.span(Span("chat/0/1", 4))]
    assert prompts == [opening, second, [*second, 7, 7, 8, *tokens.span(Span("chat/0/2", 4))]]
    assert [record.turn for record in result.records] == [0, 1, 2]
    waited = (result.records[1].reply.sent_s or 0) - (result.records[0].reply.closed_s or 0)
    assert waited > 0


@pytest.mark.slow
async def test_the_turns_behind_a_failed_one_are_offered_and_missed(start_fake: StartFake) -> None:
    server = start_fake(Behaviour(), Behaviour(refuse=500))
    result = await load(
        server.http,
        workload="conversation:turns=4,think=1ms",
        traffic=Traffic(concurrency=1),
        limits=Limits(num_requests=4),
    )
    causes = [record.failure.cause if record.failure else None for record in result.records]
    assert causes == [None, FailureCause.SERVER_ERROR, FailureCause.PREVIOUS_TURN, FailureCause.PREVIOUS_TURN]
    assert summarize(result)["offered"] == 4


@pytest.mark.slow
async def test_warm_up_prompts_are_not_those_of_the_run(start_fake: StartFake) -> None:
    server = start_fake()
    result = await load(server.http, limits=Limits(num_requests=3), num_warmup=2)
    truth = server.finish()
    warm = {tuple(row.prompt) for key, row in truth.items() if key.startswith("warmup")}
    measured = {tuple(truth[record.request_id].prompt) for record in result.records}
    assert len(warm) == 2
    assert len(measured) == 3
    assert not warm & measured


@pytest.mark.slow
async def test_stopping_writes_what_was_measured_and_leaves_out_what_was_not(start_fake: StartFake) -> None:
    server = start_fake(Behaviour(messages=((10, 1),)), Behaviour(messages=((60_000, 1),)))
    result = await load(server.http, stop_after=4, limits=Limits(num_requests=1000))
    summary = summarize(result)
    assert summary["partial"]
    assert summary["partial_reason"] == "stopped by the user"
    assert 4 <= summary["offered"] == summary["completed"] < 1000
    assert summary["interrupted"] >= 3
    assert 0 < result.window_s <= result.duration_s
