"""What an endpoint picker asks admission: never a refusal that the request itself would not meet."""

from __future__ import annotations

import pytest

from services.router.placement.views import NO_WORK, Work
from shared.errors import Overloaded
from shared.rpc.pb.tandem.v1 import worker_pb2
from tests.integration.router.router_under_test import Router, decode_worker

TOKEN_S = 1e-3


async def test_a_full_queue_has_no_room() -> None:
    decode = decode_worker()
    decode.num_blocks = 4
    async with Router([], [decode], queue_limit=1) as router:
        running = [router.submit("first")]
        await decode.expect(worker_pb2.Reserve)
        router.dispatcher.check_room("default", 0, 0.0)
        running.append(router.submit("second"))
        await router.until(lambda: router.dispatcher.num_waiting == 1)
        with pytest.raises(Overloaded, match="the limit is 1"):
            router.dispatcher.check_room("default", 0, 0.0)
        for each in running:
            await each.aclose()


async def test_a_tenant_whose_requests_wait_too_long_has_no_room_and_others_have() -> None:
    decode = decode_worker()
    decode.num_blocks = 30
    async with Router([], [decode], ttft_target_s=60.0) as router:
        for n in range(1, 20):
            router.dispatcher._room._predictor.observe_prefill(NO_WORK, Work(n * 50), n * 50 * TOKEN_S)
        running = [router.ask("first", prompt=tuple(range(5, 95)), tenant="busy")]
        await decode.expect(worker_pb2.Reserve)
        router.dispatcher.check_room("busy", 0, 0.01)  # nobody waits
        running.append(router.ask("second", prompt=tuple(range(5, 95)), tenant="busy"))
        await router.until(lambda: router.dispatcher.num_waiting == 1)
        router.dispatcher.check_room("busy", 0, 0.0)  # by the router's target of a minute
        with pytest.raises(Overloaded, match="after its deadline"):
            router.dispatcher.check_room("busy", 0, 0.01)
        assert router.dispatcher.num_waiting == 1  # it changes nothing
        for each in running:
            await each.aclose()
