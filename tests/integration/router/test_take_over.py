"""A client that comes back with a running id: its older call ends, here and on the workers."""

from __future__ import annotations

import asyncio

import pytest

from services.router.dispatch.request import Resume
from shared.errors import RequestRunning, TakenOver
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.router_under_test import PROMPT, STOP, Router, decode_worker
from tests.unit.router.reading import deltas
from tests.waiting import DEADLINE_S


async def until_token(running) -> list[int]:
    """The tokens of the next delta."""
    async with asyncio.timeout(DEADLINE_S):
        async for delta in deltas(running):
            return list(delta.token_ids)
    raise AssertionError("no token")


async def test_a_running_id_is_taken_over_with_resume_and_refused_without():
    worker = decode_worker()
    async with Router([], [worker]) as router:
        older = router.ask("r")
        first = await worker.expect(worker_pb2.Reserve)
        await worker.step(first.request_id, 50)
        assert await until_token(older) == [50]
        with pytest.raises(RequestRunning):
            router.ask("r")
        with pytest.raises(RequestRunning):
            router.ask("r", tenant="another", resume=Resume((50,)))

        newer = router.ask("r", resume=Resume((50,)))
        with pytest.raises(TakenOver):
            await until_token(older)
        await older.aclose()
        cancel = await worker.expect(types_pb2.Cancel)
        second = await worker.expect(worker_pb2.Reserve)
        assert cancel.request_id == first.request_id != second.request_id
        assert list(second.token_ids) == [*PROMPT, 50]
        assert second.num_prompt_tokens == len(PROMPT)
        await worker.step(second.request_id, 51, finish=STOP)
        assert await until_token(newer) == [51]
        assert newer.ended
        await newer.aclose()
        assert router.dispatcher.num_active == 0
        assert router.metrics.outcomes == ["taken_over", "finished"]
        assert all(not link.num_requests for link in router.fleet.links)


async def test_a_request_that_waits_in_the_queue_can_be_taken_over():
    worker = decode_worker()
    async with Router([], [worker]) as router:
        older = router.ask("r")
        newer = router.ask("r", resume=Resume())  # before the older one's first step
        reserve = await worker.expect(worker_pb2.Reserve)
        with pytest.raises(TakenOver):
            await until_token(older)
        await worker.step(reserve.request_id, 51, finish=STOP)
        assert await until_token(newer) == [51]
        await older.aclose()
        await newer.aclose()
        assert router.dispatcher.num_active == 0


async def test_workers_hear_of_it_where_other_routers_are_connected():
    worker = decode_worker()
    async with Router([], [worker]) as router:
        await worker.report(num_free_blocks=50, num_total_blocks=100, routers=["router-under-test", "router-1"])
        await router.until(lambda: len(router.fleet.decodes["d0"].load.routers) == 2)
        running = router.ask("r", resume=Resume((50,)), tenant="t")
        taken = await worker.expect(types_pb2.TakeOver)
        assert (taken.request_id, taken.tenant) == ("r", "t")
        reserve = await worker.expect(worker_pb2.Reserve)
        await worker.step(reserve.request_id, 51, finish=STOP)
        assert await until_token(running) == [51]
        await running.aclose()
