"""Requests that come while a role has no worker: who serves them, how long they wait, and what a refusal says."""

from __future__ import annotations

import pytest

from shared.errors import WorkerLost
from shared.rpc.pb.tandem.v1 import worker_pb2
from tests.integration.router.router_under_test import STOP, Router, decode_worker, prefill_worker, read


async def test_without_its_prefill_worker_a_decode_worker_computes_the_prompt():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        await prefill.stop()
        await router.until(lambda: not router.fleet.prefills["p0"].connected)
        assert "no prefill worker is ready" in router.dispatcher.not_ready_reason()
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        assert reserve.prefill_here
        await decode.step(reserve.request_id, 11, 12, finish=STOP)
        assert await read(running) == [11, 12]
        assert router.metrics.routes == ["no_prefill"]


async def test_without_its_decode_worker_a_request_waits_and_is_refused_with_a_time_to_come_back():
    decode = decode_worker()
    async with Router([], [decode], queue_timeout_s=0.2) as router:
        await decode.stop()
        await router.until(lambda: not router.fleet.decodes["d0"].connected)
        assert router.dispatcher.max_prompt_tokens() > 0
        running = router.submit()
        with pytest.raises(WorkerLost, match="no decode worker is ready") as refused:
            await read(running)
        assert refused.value.details["retry_after_s"] > 0


async def test_a_role_with_workers_of_another_model_alone_is_not_waited_for():
    async with Router([prefill_worker()], [decode_worker(fingerprint="other")]) as router:
        await router.until(lambda: router.dispatcher.not_ready_reason() != "")
        with pytest.raises(WorkerLost) as refused:
            router.submit()
        assert refused.value.details["retry_after_s"] > 0
