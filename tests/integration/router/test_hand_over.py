"""A phase charges only the worker that owns it, and attempts count only while they bring no token."""

from __future__ import annotations

import asyncio

import pytest

from services.router.dispatch.record import RequestState
from shared.errors import DeadlineExceeded, Overloaded, TransferFailed, WorkerLost
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.router_under_test import (
    PROMPT,
    STOP,
    Router,
    decode_worker,
    prefill_worker,
    read,
    to_submit,
)


async def test_a_prefill_worker_that_dies_after_the_hand_over_costs_nothing():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 50)
        await router.until(lambda: running.state is RequestState.SHIPPING)
        await decode.step(submit.request_id, 51)
        await router.until(lambda: running.state is RequestState.DECODING)
        assert router.fleet.prefills["p0"].num_requests == 0
        await prefill.stop()
        await router.until(lambda: not router.fleet.prefills["p0"].connected)
        await decode.step(submit.request_id, 52, finish=STOP)
        assert await read(running) == [50, 51, 52]
        assert router.metrics.outcomes == ["finished"]
        assert decode.commands.empty()


async def test_a_failure_that_a_prefill_worker_reports_after_the_hand_over_is_nobodys():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 50)
        await decode.step(submit.request_id, 51)
        await router.until(lambda: running.state is RequestState.DECODING)
        await prefill.failed(submit.request_id, to_proto(TransferFailed("late")))
        await prefill.report(num_free_blocks=77, num_total_blocks=100)
        await router.until(lambda: router.fleet.prefills["p0"].load.num_free_blocks == 77)
        await decode.step(submit.request_id, 52, finish=STOP)
        assert await read(running) == [50, 51, 52]


async def test_a_prefill_worker_that_dies_while_it_ships_is_charged():
    first, second, decode = prefill_worker("p0"), prefill_worker("p1"), decode_worker()
    async with Router([first, second], [decode]) as router:
        running = router.submit()
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.reserved(reserve.request_id)
        await router.until(lambda: first.commands.qsize() + second.commands.qsize() == 1)
        lost, other = (first, second) if first.commands.qsize() else (second, first)
        await lost.first_token(reserve.request_id, 50)
        await router.until(lambda: running.state is RequestState.SHIPPING)
        await lost.stop()
        assert not (await decode.expect(types_pb2.Cancel)).peer_active
        submit = await to_submit(other, decode)
        assert list(submit.token_ids) == [*PROMPT, 50]
        await other.first_token(submit.request_id, 51, finish=STOP)
        assert await read(running) == [50, 51]


async def test_steps_that_overtake_the_first_token_do_not_hand_over():
    """The first token exists at the prefill worker alone: without it the answer has a hole."""
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode], max_attempts=1) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await decode.step(submit.request_id, 51)
        await decode.report(num_free_blocks=77, num_total_blocks=100)
        await router.until(lambda: router.fleet.decodes["d0"].load.num_free_blocks == 77)
        assert running.state is RequestState.OVERTAKEN
        await prefill.stop()
        with pytest.raises(WorkerLost):
            await read(running)
        assert running.produced == []


async def test_attempts_that_bring_tokens_do_not_count():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode], max_attempts=2) as router:
        running = router.submit()
        for token in range(50, 56):
            submit = await to_submit(prefill, decode)
            await prefill.first_token(submit.request_id, token)
            await router.until(lambda token=token: running.produced[-1:] == [token])
            await prefill.failed(submit.request_id, to_proto(TransferFailed("gone")))
            await prefill.expect(types_pb2.Cancel)
            await decode.expect(types_pb2.Cancel)
        submit = await to_submit(prefill, decode)
        await prefill.first_token(submit.request_id, 56, finish=STOP)
        assert await read(running) == list(range(50, 57))


async def test_a_long_answer_is_bounded_by_its_deadline():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode], max_attempts=2) as router:
        running = router.ask(timeout_s=0.3)

        async def fail_for_ever() -> None:
            token = 50
            while True:
                submit = await to_submit(prefill, decode)
                await prefill.first_token(submit.request_id, token := token + 1)
                await prefill.failed(submit.request_id, to_proto(TransferFailed("gone")))
                await prefill.expect(types_pb2.Cancel)
                await decode.expect(types_pb2.Cancel)

        failing = asyncio.create_task(fail_for_ever())
        with pytest.raises(DeadlineExceeded):
            await read(running)
        failing.cancel()
        assert running.state is RequestState.FAILED
        assert router.dispatcher.num_active == 0


async def test_a_full_prefill_worker_is_not_the_decode_workers_fault():
    prefill, decode = prefill_worker(), decode_worker()
    async with Router([prefill], [decode]) as router:
        running = router.submit()
        submit = await to_submit(prefill, decode)
        await prefill.failed(submit.request_id, to_proto(Overloaded("draining")))
        await router.until(lambda: not router.fleet.prefill_pool.get("p0").accepting)
        assert router.fleet.decode_pool.get("d0").accepting
        await running.aclose()
