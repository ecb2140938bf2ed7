"""A router that drains finishes what it has and refuses the rest."""

from __future__ import annotations

import asyncio

import pytest

from services.router.dispatch.dispatcher import DRAINING
from shared.errors import Draining
from tests.integration.router.router_under_test import Router, decode_worker, prefill_worker
from tests.integration.router.scripted_worker import DEADLINE_S


async def test_it_ends_with_the_last_request_and_refuses_new_ones_with_a_hint():
    async with Router([prefill_worker()], [decode_worker()]) as router:
        assert router.dispatcher.not_ready_reason() == ""
        running = router.submit()
        draining = asyncio.create_task(router.dispatcher.drain(DEADLINE_S))
        await asyncio.sleep(0)
        with pytest.raises(Draining) as refused:
            router.submit("other")
        assert refused.value.http_status == 503
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s > 0
        assert router.dispatcher.not_ready_reason() == DRAINING
        assert not draining.done()
        await running.aclose()
        await asyncio.wait_for(draining, DEADLINE_S)


async def test_it_does_not_wait_longer_than_it_may_nor_once_it_is_hurried():
    async with Router([prefill_worker()], [decode_worker()]) as router:
        running = router.submit()
        await asyncio.wait_for(router.dispatcher.drain(0.05), DEADLINE_S)
        draining = asyncio.create_task(router.dispatcher.drain(10 * DEADLINE_S))
        router.dispatcher.hurry()
        await asyncio.wait_for(draining, DEADLINE_S)
        await running.aclose()


async def test_a_router_without_requests_is_drained_at_once():
    async with Router([prefill_worker()], [decode_worker()]) as router:
        await asyncio.wait_for(router.dispatcher.drain(10 * DEADLINE_S), DEADLINE_S)
