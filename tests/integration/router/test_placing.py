"""What placement hears of a request, and when the queue is looked at again."""

from __future__ import annotations

import math

import pytest

from services.router.views.explanation import explanation
from services.router.workers.fleet import Fleet
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.router_under_test import Router, decode_worker, prefill_worker


async def test_placement_hears_how_much_time_is_left_and_explain_how_long_it_waited(monkeypatch):
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        heard = {}
        choose = router.dispatcher._room._placement.choose

        def noting(request, *pools, collocated):
            heard["slack_s"] = request.slack_s
            return choose(request, *pools, collocated=collocated)

        monkeypatch.setattr(router.dispatcher._room._placement, "choose", noting)
        for name, target_s in (("hurried", 5000.0), ("patient", 0.0)):
            running = router.ask(name, ttft_timeout_s=target_s)
            await decode.expect(worker_pb2.Reserve)
            ask, [_, matched, choosing, placed] = running.record.ask, running.record.entries[:4]
            if target_s:
                assert target_s - (placed.at - ask.arrived_at) <= heard["slack_s"] <= target_s
            else:
                assert heard["slack_s"] == math.inf
            [told] = explanation(running.record, name).attempts
            assert 0 < told.queue_ms / 1e3 <= placed.at - matched.at
            assert told.queue_ms / 1e3 == pytest.approx(choosing.at - matched.at)
            await running.aclose()
            await decode.expect(types_pb2.Cancel)


async def test_where_other_routers_place_too_a_queue_is_looked_at_again_by_the_clock(monkeypatch):
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        await decode.report(num_free_blocks=0, num_total_blocks=100)
        await router.until(lambda: router.fleet.decodes["d0"].load.num_free_blocks == 0)
        running = router.submit()
        await router.until(lambda: router.dispatcher.num_waiting == 1)
        assert router.dispatcher._room._again is None  # every change is reported
        monkeypatch.setattr(Fleet, "shared", True)
        router.dispatcher.pump()
        timer = router.dispatcher._room._again
        assert timer is not None
        router.dispatcher.pump()
        assert router.dispatcher._room._again is timer
        await router.until(lambda: router.dispatcher._room._again is not timer)
        assert router.dispatcher._room._again is not None
        await running.aclose()
        await router.until(lambda: router.dispatcher._room._again is None)
