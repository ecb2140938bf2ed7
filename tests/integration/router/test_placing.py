"""Where a request goes and whether: room, hits, missing roles, unequal workers, a drain."""

from __future__ import annotations

import asyncio
import math

import pytest

from services.router.dispatch.dispatcher import DRAINING
from services.router.dispatch.request import PoolRequest
from services.router.placement.views import NO_WORK, PrefixHits, Work
from services.router.views.explanation import explanation
from services.router.views.status import _failures
from services.router.workers.fleet import Fleet
from shared.errors import Draining, Overloaded, WorkerLost
from shared.fingerprints import deterministic_fingerprint
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.tasks import end_task
from tests.integration.router.router_under_test import STOP, Router, decode_worker, prefill_worker, read
from tests.integration.router.scripted_worker import DEADLINE_S


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


async def test_idle_room_is_half_of_a_decode_workers_places_where_half_its_blocks_are_free_and_prompts_find_no_queue():
    prefill, first, second = prefill_worker(), decode_worker(), decode_worker("d1")
    async with Router([prefill], [first, second]) as router:
        views = {view.name: view for pool in (router.fleet.prefill_pool, router.fleet.decode_pool) for view in pool}
        room = router.dispatcher.idle_room

        async def reported(worker, num_requests=0, num_free_blocks=100, **more) -> None:
            load = {"num_running": num_requests, "num_free_blocks": num_free_blocks, "num_total_blocks": 100, **more}
            await worker.report(**load)
            view = views[worker.name]
            await router.until(
                lambda: (
                    (view.num_requests, view.num_free_blocks, view.num_queued_tokens, view.accepting)
                    == (num_requests, num_free_blocks, more.get("num_queued_tokens", 0), not more.get("draining"))
                )
            )

        places = views["d0"].max_num_seqs // 2
        assert places > 1
        await reported(prefill)
        await reported(first, num_free_blocks=50)
        await reported(second, num_requests=places + 1)
        assert room() == places, "one that is more than half full takes nothing from another one's room"
        await reported(first, num_requests=1)
        assert room() == places - 1
        await reported(second)
        assert room() == 2 * places - 1
        await reported(first, num_free_blocks=49)
        await reported(second, draining=True)
        assert room() == 0
        await reported(first)
        assert room() == places
        await reported(prefill, num_queued_tokens=5)
        assert room() == 0
        await reported(prefill, draining=True)
        assert room() == 0
        await reported(prefill)
        assert room() == places
        await router.dispatcher.drain(0.0)
        assert room() == 0


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


async def test_a_hurried_drain_waits_for_no_prompt_that_is_pooled_either():
    prefill = prefill_worker()
    async with Router([prefill], [decode_worker()]) as router:
        pooled = asyncio.create_task(router.dispatcher.pool(PoolRequest("p", PROMPT, "last", "default", "", 0.0)))
        await prefill.expect(worker_pb2.Submit)
        draining = asyncio.create_task(router.dispatcher.drain(10 * DEADLINE_S))
        await asyncio.sleep(0)
        assert not draining.done()
        router.dispatcher.hurry()
        try:
            await asyncio.wait_for(draining, DEADLINE_S)
        finally:
            await end_task(pooled)


async def test_a_router_without_requests_is_drained_at_once():
    async with Router([prefill_worker()], [decode_worker()]) as router:
        await asyncio.wait_for(router.dispatcher.drain(10 * DEADLINE_S), DEADLINE_S)


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


ONE, OTHER = (deterministic_fingerprint("model", arithmetic) for arithmetic in ("1a", "2b"))


@pytest.mark.parametrize(
    ("fingerprints", "reason"),
    [((ONE, OTHER), "computes model model in other bits"), ((ONE, "model"), "deterministic, the fleet")],
)
async def test_the_second_is_named_and_left_out(fingerprints: tuple[str, str], reason: str) -> None:
    workers = [decode_worker(f"d{i}", fingerprint=fingerprint) for i, fingerprint in enumerate(fingerprints)]
    async with Router([], workers) as router:
        (refused,) = (link for link in router.fleet.links if not link.connected)
        (failure,) = _failures(router.fleet)
        assert f"worker {refused.name} is not connected" in failure
        assert reason in failure


async def test_those_that_compute_alike_serve_together() -> None:
    async with Router([], [decode_worker(f"d{i}", fingerprint=ONE) for i in range(2)]) as router:
        assert all(link.connected for link in router.fleet.links)
        assert _failures(router.fleet) == []


PROMPT = tuple(range(800))


class Hits:
    """A look-up that always finds the same."""

    def __init__(self, num_tokens: int) -> None:
        self._hits = PrefixHits.of({"p0": num_tokens} if num_tokens else {})

    async def hits_for(self, _) -> PrefixHits:
        return self._hits


async def routed(router: Router, num_hit_tokens: int):
    """A prompt of 8 s with 3 s to its first token: no pause of a busy machine takes as long."""
    for n in range(1, 20):
        router.dispatcher._room._predictor.observe_prefill(NO_WORK, Work(n * 50), n * 50 * 10 * TOKEN_S)
    router.dispatcher._room._lookup = Hits(num_hit_tokens)
    return router.ask(prompt=PROMPT, ttft_timeout_s=3.0)


async def test_a_long_prompt_that_a_worker_holds_is_let_in():
    prefill, decode = prefill_worker(), decode_worker()
    decode.num_blocks = prefill.num_blocks = 1000
    async with Router([prefill], [decode]) as router:
        running = await routed(router, 784)
        await decode.expect(worker_pb2.Reserve)
        await running.aclose()


async def test_the_same_prompt_is_refused_where_nobody_holds_it():
    prefill, decode = prefill_worker(), decode_worker()
    decode.num_blocks = prefill.num_blocks = 1000
    async with Router([prefill], [decode]) as router:
        with pytest.raises(Overloaded):
            await read(await routed(router, 0))
        assert decode.commands.empty()


async def test_admission_hears_how_much_of_the_prompt_is_cached(monkeypatch):
    prefill, decode = prefill_worker(), decode_worker()
    decode.num_blocks = prefill.num_blocks = 1000
    async with Router([prefill], [decode]) as router:
        admission, seen = router.dispatcher._room._admission, []
        enter = admission.enter

        def noting(item, *args, num_cached, **more):
            seen.append((item.num_tokens, num_cached))
            return enter(item, *args, num_cached=num_cached, **more)

        monkeypatch.setattr(admission, "enter", noting)
        running = await routed(router, 784)
        await decode.expect(worker_pb2.Reserve)
        assert seen == [(16, 784)]
        await running.aclose()
