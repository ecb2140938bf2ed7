"""A request's life in the router, against scripted workers over real gRPC sessions."""

from __future__ import annotations

import asyncio

import pytest

from services.router.dispatch.pooled import MAX_ATTEMPTS, PooledCalls
from services.router.dispatch.request import FinishReason, PoolRequest, Request
from services.router.placement.decision import Thresholds
from services.router.views.explanation import explanation
from services.router.views.timings import ttft_split
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, NotFound, Overloaded, PromptTooLong, TandemError, TransferFailed, WorkerLost
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.router_under_test import (
    PROMPT,
    STOP,
    Router,
    decode_worker,
    prefill_worker,
    read,
    to_second_token,
    to_submit,
)
from tests.integration.router.scripted_worker import ScriptedWorker
from tests.unit.router.reading import deltas
from tests.waiting import DEADLINE_S


async def test_a_request_goes_reserve_submit_first_token_steps():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        assert (submit.ticket, list(submit.needed_blocks)) == (99, [0, 1])
        assert submit.transfer_address == b"d0"
        assert list(submit.token_ids) == list(PROMPT)
        await prefill.first_token(submit.request_id, 50, num_cached_tokens=4, prefill_compute_ms=0.01)
        await decode.step(submit.request_id, 51, first_decode_step_ms=0.001)
        await decode.step(submit.request_id, 52, 53, finish=STOP)
        assert await read(running) == [50, 51, 52, 53]
        summary = running.record
        assert (summary.prefill_worker, summary.decode_worker) == ("p0", "d0")
        assert summary.num_cached_tokens == 4
        split = ttft_split(summary)
        parts = split.placement_ms + split.queue_ms + split.reserve_ms + split.prefill_compute_ms + split.return_ms
        assert split.ttft_ms == pytest.approx(parts, abs=0.1)
        assert router.metrics.outcomes == ["finished"]
        assert router.dispatcher.num_active == 0


async def test_steps_that_overtake_the_first_token_wait_for_it():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await decode.step(submit.request_id, 51)
        await decode.step(submit.request_id, 52, finish=STOP)
        await prefill.first_token(submit.request_id, 50)
        assert await read(running) == [50, 51, 52]


async def answered_by_its_first_token(router, prefill, decode):
    """The Submit of such a request."""
    running = router.submit()
    submit = await to_submit(prefill, decode)
    await prefill.first_token(submit.request_id, 2, finish=STOP)
    assert await read(running) == [2]
    return submit


async def test_a_first_token_that_ends_the_request_cancels_nothing():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        await answered_by_its_first_token(router, prefill, decode)
        running = router.submit("next")
        assert (await decode.expect(worker_pb2.Reserve)).request_id.startswith("next#")
        await running.aclose()


async def test_a_hand_off_that_stands_still_behind_an_answers_only_token_is_given_up():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        submit = await answered_by_its_first_token(router, prefill, decode)
        await decode.send(arrivals=worker_pb2.Arrivals(request_id=submit.request_id, num_arrived=1))
        cancel = await decode.expect(types_pb2.Cancel)
        assert (cancel.request_id, cancel.peer_active) == (submit.request_id, True), "a trailer may still come"


async def test_collocated_reserves_with_prefill_here():
    decode = decode_worker()
    async with Router([], [decode]) as router:
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        assert reserve.prefill_here
        await decode.step(reserve.request_id, 50, num_cached_tokens=4)
        await decode.step(reserve.request_id, 51, finish=STOP)
        assert await read(running) == [50, 51]
        assert running.record.num_cached_tokens == 4


async def test_a_client_that_leaves_cancels_on_both_pools():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await running.aclose()
        await running.aclose()
        cancel = await prefill.expect(types_pb2.Cancel)
        assert (cancel.request_id, cancel.peer_active) == (submit.request_id, True)
        cancel = await decode.expect(types_pb2.Cancel)
        assert (cancel.request_id, cancel.peer_active) == (submit.request_id, True)
        assert router.dispatcher.num_active == 0


async def test_a_cancel_before_the_submit_says_that_no_sender_knows():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        await decode.expect(worker_pb2.Reserve)
        await running.aclose()
        assert not (await decode.expect(types_pb2.Cancel)).peer_active


async def test_a_lost_decode_worker_is_replaced_and_no_token_is_repeated_or_dropped():
    prefill, first, second = prefill_worker(), decode_worker("d0"), decode_worker("d1")
    second.num_blocks = 60
    async with Router([prefill], [first, second]) as router:
        running, submit = await to_second_token(router, prefill, first)
        await first.stop()
        again = await to_submit(prefill, second)  # no Cancel before it: the prefill worker had handed over
        assert again.request_id != submit.request_id
        assert list(again.token_ids) == [*PROMPT, 50, 51]
        assert again.num_prompt_tokens == len(PROMPT)
        await prefill.first_token(again.request_id, 52)
        await second.step(again.request_id, 53, finish=STOP)
        assert await read(running) == [50, 51, 52, 53]
        assert router.metrics.outcomes == ["retried worker_lost", "finished"]


async def test_a_lost_prefill_worker_is_replaced_and_the_reservation_is_freed_at_once():
    first, second, decode = prefill_worker("p0"), prefill_worker("p1"), decode_worker()
    async with Router([first, second], [decode]) as router:
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.reserved(reserve.request_id)
        await router.until(lambda: first.commands.qsize() + second.commands.qsize() == 1)
        lost, other = (first, second) if first.commands.qsize() else (second, first)
        await lost.stop()
        assert not (await decode.expect(types_pb2.Cancel)).peer_active
        submit = await to_submit(other, decode)
        await other.first_token(submit.request_id, 50, finish=STOP)
        assert await read(running) == [50]


async def test_a_failed_transfer_is_tried_again_and_gives_up_in_the_end():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode], max_attempts=2) as router:
        running = router.submit()
        for _ in range(2):
            submit = await to_submit(prefill, decode)
            await prefill.failed(submit.request_id, to_proto(TransferFailed("gone")))
            await prefill.expect(types_pb2.Cancel)
            await decode.expect(types_pb2.Cancel)
        with pytest.raises(TransferFailed):
            await read(running)
        assert router.metrics.outcomes == ["retried transfer_failed", "transfer_failed"]


async def test_a_worker_that_is_full_against_our_view_is_asked_again_after_its_next_report():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.failed(reserve.request_id, to_proto(Overloaded("full")))
        await decode.expect(types_pb2.Cancel)
        await router.until(lambda: router.dispatcher.num_waiting == 1)
        assert decode.commands.empty()
        await decode.report(num_free_blocks=50, num_total_blocks=100)
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 50, finish=STOP)
        assert await read(running) == [50]


async def test_an_error_that_no_other_worker_could_mend_goes_to_the_client():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.failed(reserve.request_id, to_proto(PromptTooLong("long", field="max_tokens", limit=9)))
        with pytest.raises(PromptTooLong) as refused:
            await read(running)
        assert refused.value.field == "max_tokens"


async def test_requests_wait_until_a_worker_has_room_and_a_full_queue_refuses():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode], queue_limit=2) as router:
        await decode.report(num_free_blocks=0, num_total_blocks=100)
        await router.until(lambda: router.fleet.decodes["d0"].load.num_free_blocks == 0)
        waiting = [router.submit("a"), router.submit("b")]
        await router.until(lambda: router.dispatcher.num_waiting == 2)
        with pytest.raises(Overloaded):
            router.submit("c")
        await decode.report(num_free_blocks=90, num_total_blocks=100)
        names = {(await decode.expect(worker_pb2.Reserve)).request_id for _ in waiting}
        assert {name.partition("#")[0] for name in names} == {"a", "b"}
        for running in waiting:
            await running.aclose()


async def test_a_running_id_is_refused():
    async with Router([prefill_worker()], [decode_worker()]) as router:
        running = router.submit("same")
        with pytest.raises(InvalidRequest) as refused:
            router.submit("same")
        assert refused.value.field == "request_id"
        await running.aclose()


async def test_a_worker_with_another_model_is_not_used_and_said_so():
    async with Router([prefill_worker()], [decode_worker(fingerprint="other")]) as router:
        reason = router.dispatcher.not_ready_reason()
        if not reason:  # the odd one came first: then the prefill worker is the one that does not fit
            pytest.fail("a fleet of two models is ready")
        assert "model" in reason
        with pytest.raises(WorkerLost):
            router.submit()


async def test_a_deadline_ends_the_request_and_frees_the_workers():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        params = SamplingParams(seed=1, max_tokens=8)
        running = router.dispatcher.submit(Request("r", PROMPT, params, timeout_s=3.0))
        await decode.expect(worker_pb2.Reserve)
        with pytest.raises(TandemError) as late:
            await read(running)
        assert late.value.code == "deadline_exceeded"
        await decode.expect(types_pb2.Cancel)


async def test_logprobs_and_finish_reach_the_client():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit(logprobs=1)
        submit = await to_submit(prefill, decode)
        assert submit.sampling.logprobs == 1
        position = types_pb2.PositionLogprobs(logprob=-0.5, top=[types_pb2.TokenLogprob(token_id=50, logprob=-0.5)])
        await prefill.first_token(submit.request_id, 50, finish=STOP, logprobs=[position])
        (delta,) = [delta async for delta in deltas(running)]
        assert delta.finish_reason is FinishReason.STOP
        assert delta.logprobs[0].top == ((50, -0.5),)


async def test_a_short_suffix_is_prefilled_by_the_decode_worker_and_counted():
    prefill, decode = prefill_worker(), decode_worker()
    thresholds = Thresholds(short_suffix_tokens=len(PROMPT))
    async with Router([prefill], [decode], placement={"thresholds": thresholds}) as router:
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        assert reserve.prefill_here
        await decode.step(reserve.request_id, 50, finish=STOP)
        assert await read(running) == [50]
        assert running.record.prefill_worker == ""
        longer = router.ask("longer", prompt=(*PROMPT, 1))
        assert not (await decode.expect(worker_pb2.Reserve)).prefill_here
        await longer.aclose()
        assert router.metrics.routes == ["short_suffix", "hand_off"]


async def test_a_placement_can_be_explained_with_every_attempt():
    prefill, first, second = prefill_worker(), decode_worker("d0"), decode_worker("d1")
    second.num_blocks = 60
    async with Router([prefill], [first, second]) as router:
        running = router.submit()
        await first.expect(worker_pb2.Reserve)
        await first.stop()
        await second.expect(worker_pb2.Reserve)
        told = explanation(running.record, "r")
        assert [a.decode_worker for a in told.attempts] == ["d0", "d1"]
        before, after = told.attempts
        assert [c.worker for c in before.decode_candidates] == ["d0", "d1"]
        assert [c.worker for c in after.decode_candidates] == ["d1"]
        assert [p.scorer for p in before.prefill_candidates[0].parts] == ["queue"]
        assert before.route == "hand_off"
        with pytest.raises(NotFound):
            explanation(None, "another")
        await running.aclose()


async def serve_some(router: Router, prefill: ScriptedWorker, decode: ScriptedWorker, compute_ms: float) -> None:
    """Enough prompts for the predictor, each said to have taken `compute_ms`."""
    for n in range(10):
        running = router.ask(f"learn-{n}")
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 50, finish=STOP, prefill_compute_ms=compute_ms)
        await read(running)


async def test_what_can_no_longer_meet_its_ttft_deadline_is_refused_at_once():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        await serve_some(router, prefill, decode, compute_ms=500.0)
        hopeless = router.ask("hopeless", ttft_timeout_s=0.3)
        with pytest.raises(Overloaded) as refused:
            await read(hopeless)
        assert router.metrics.refusals == ["arrival"]
        assert refused.value.retry_after_s >= 1
        assert decode.commands.empty()
        patient = router.ask("patient", ttft_timeout_s=30.0)
        await decode.expect(worker_pb2.Reserve)
        await patient.aclose()


async def test_a_request_whose_deadline_passes_in_the_queue_is_refused_then():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        await decode.report(num_free_blocks=0, num_total_blocks=100)
        await router.until(lambda: router.fleet.decodes["d0"].load.num_free_blocks == 0)
        waiting = router.ask("late", ttft_timeout_s=0.05)
        with pytest.raises(Overloaded):
            await read(waiting)
        assert router.dispatcher.num_waiting == router.dispatcher.num_active == 0


async def test_a_tenant_that_floods_does_not_hold_up_another():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        await decode.report(num_free_blocks=0, num_total_blocks=100)
        await router.until(lambda: router.fleet.decodes["d0"].load.num_free_blocks == 0)
        waiting = [router.ask(f"flood-{n}", tenant="flood") for n in range(6)]
        waiting.append(router.ask("quiet", tenant="quiet"))
        await router.until(lambda: router.dispatcher.num_waiting == 7)
        await decode.report(num_free_blocks=90, num_total_blocks=100)
        order = [(await decode.expect(worker_pb2.Reserve)).request_id for _ in waiting]
        assert [name.partition("#")[0] for name in order].index("quiet") <= 1
        for running in waiting:
            await running.aclose()


async def test_a_request_cancelled_as_it_is_placed_leaves_nothing_on_the_workers():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        for n in range(20):
            running = router.submit(f"r{n}")
            for _ in range(n % 5):
                await asyncio.sleep(0)
            await running.aclose()
        view = router.fleet.decode_pool.get("d0")
        assert (view.num_free_blocks, view.num_requests) == (100, 0)
        assert router.fleet.prefill_pool.get("p0").num_queued_tokens == 0


async def test_workers_that_say_nothing_of_a_request_lose_it():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode], worker_timeout_s=3.0, max_attempts=1) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 50)
        with pytest.raises(WorkerLost, match=r"nothing heard of the request for 3 s"):
            await read(running)
        assert (await decode.expect(types_pb2.Cancel)).request_id == submit.request_id


async def test_a_request_cancelled_before_its_first_step_leaves_its_id_free():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        await router.submit().aclose()
        assert router.dispatcher.num_active == 0
        assert router.metrics.outcomes == ["cancelled"]
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 50, finish=STOP)
        assert await read(running) == [50]


async def test_a_retry_leaves_the_workers_that_failed_although_they_hold_the_session():
    prefills = {name: prefill_worker(name) for name in ("p0", "p1")}
    decodes = {name: decode_worker(name) for name in ("d0", "d1")}
    async with Router([*prefills.values()], [*decodes.values()]) as router:
        running = router.ask(session="chat")
        await router.until(lambda: any(worker.commands.qsize() for worker in decodes.values()))
        first = next(name for name, worker in decodes.items() if worker.commands.qsize())
        reserve = await decodes[first].expect(worker_pb2.Reserve)
        await decodes[first].reserved(reserve.request_id, ticket=99, needed=(0, 1))
        await router.until(lambda: any(worker.commands.qsize() for worker in prefills.values()))
        sender = next(name for name, worker in prefills.items() if worker.commands.qsize())
        submit = await prefills[sender].expect(worker_pb2.Submit)
        await prefills[sender].failed(submit.request_id, to_proto(TransferFailed("gone")))
        other_prefill = prefills["p1" if sender == "p0" else "p0"]
        again = await to_submit(other_prefill, decodes["d1" if first == "d0" else "d0"])
        await other_prefill.first_token(again.request_id, 50, finish=STOP)
        assert await read(running) == [50]


async def test_a_prompt_to_pool_is_tried_three_times_also_on_the_only_worker():
    prefill = prefill_worker()
    async with Router([prefill], [decode_worker()]) as router:
        calls = PooledCalls(router.fleet)
        call = asyncio.create_task(calls.pool(PoolRequest("p", PROMPT, "last", "default", "", DEADLINE_S)))
        for _ in range(MAX_ATTEMPTS):
            submit = await prefill.expect(worker_pb2.Submit)
            await prefill.failed(submit.request_id, to_proto(Overloaded("full", retry_after_s=1.0)))
        with pytest.raises(Overloaded):
            await call
        assert prefill.commands.empty()
        await calls.idle()
