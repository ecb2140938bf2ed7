"""Every worker hears that a session is over, and when one comes back, by the name that its requests carried."""

from __future__ import annotations

import asyncio

import pytest

from services.router.workers import fleet
from shared.errors import DeadlineExceeded, WorkerLost
from shared.rpc.pb.tandem.v1 import worker_pb2
from tests.integration.router.router_under_test import STOP, Router, decode_worker, prefill_worker, read, to_submit
from tests.waiting import DEADLINE_S


async def closed(worker, num_blocks: int) -> worker_pb2.CloseSession:
    command = await worker.expect(worker_pb2.CloseSession)
    await worker.send(session_closed=worker_pb2.SessionClosed(call=command.call, num_blocks=num_blocks))
    return command


async def test_every_worker_closes_the_session_that_its_commands_named():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.ask("r", tenant="t", session="s", retain_s=300.0, next_turn_s=20.0)
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.reserved(reserve.request_id)
        submit = await prefill.expect(worker_pb2.Submit)
        assert [(each.tenant, each.session, each.retain_s) for each in (reserve, submit)] == [("t", "s", 300.0)] * 2
        assert reserve.next_turn_s == 20.0  # counted from the answer's end, of which the prefill worker hears
        closing = asyncio.create_task(router.fleet.close_session("t", "s"))
        asked = [await closed(worker, count) for worker, count in ((prefill, 3), (decode, 4))]
        assert [(each.tenant, each.session) for each in asked] == [("t", "s")] * 2
        async with asyncio.timeout(DEADLINE_S):
            assert await closing == 7
        await running.aclose()


async def test_the_prefill_worker_hears_when_the_session_comes_back_at_the_answers_end():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.ask("r", tenant="t", session="s", retain_s=300.0, next_turn_s=20.0)
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 11)
        await decode.step(submit.request_id, 12, finish=STOP)
        assert await read(running) == [11, 12]
        said = await prefill.expect(worker_pb2.ExpectSession)
        assert (said.tenant, said.session, said.next_turn_s) == ("t", "s", 20.0)


async def test_a_worker_that_is_lost_meanwhile_or_says_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    worker, silent = decode_worker(), decode_worker()
    async with Router([], [worker]) as router:
        closing = asyncio.create_task(router.fleet.close_session("t", "s"))
        await worker.expect(worker_pb2.CloseSession)
        await worker.stop()
        with pytest.raises(WorkerLost):
            await closing
    monkeypatch.setattr(fleet, "CLOSE_TIMEOUT_S", 0.05)
    async with Router([], [silent]) as router:
        with pytest.raises(DeadlineExceeded):
            await router.fleet.close_session("t", "s")


async def test_every_worker_hears_when_a_session_comes_back_and_a_request_that_says_nothing_carries_nothing():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.ask("r", session="s", retain_s=300.0)
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.reserved(reserve.request_id)
        submit = await prefill.expect(worker_pb2.Submit)
        assert not reserve.HasField("next_turn_s")
        assert (submit.tenant, submit.session) == (reserve.tenant, reserve.session)
        router.fleet.expect_session("t", "s", 30.0)
        asked = [await worker.expect(worker_pb2.ExpectSession) for worker in (prefill, decode)]
        assert [(each.tenant, each.session, each.next_turn_s) for each in asked] == [("t", "s", 30.0)] * 2
        await running.aclose()
