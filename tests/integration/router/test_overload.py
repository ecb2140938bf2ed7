"""Three times the capacity: some are refused in time to go elsewhere, the others are served as if nothing were."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from shared.errors import Overloaded
from shared.rpc.pb.tandem.v1 import worker_pb2
from tests.integration.router.router_under_test import PROMPT, STOP, Router, decode_worker, prefill_worker
from tests.integration.router.scripted_worker import ScriptedWorker
from tests.unit.router.reading import deltas

SERVICE_S = 0.02
"""What a prompt takes on the prefill worker: its capacity is 50 requests/s."""
TARGET_S = 0.5
"""What the client wants. The router is told a little less: under overload all who are served come just in time."""
ROUTER_TARGET_S = 0.4


async def reserve_all(decode: ScriptedWorker) -> None:
    while True:
        command = await decode.commands.get()
        if isinstance(command, worker_pb2.Reserve):
            await decode.reserved(command.request_id)


async def prefill_one_after_the_other(prefill: ScriptedWorker) -> None:
    while True:
        command = await prefill.commands.get()
        if isinstance(command, worker_pb2.Submit):
            begin = time.perf_counter()
            await asyncio.sleep(SERVICE_S)
            took_ms = (time.perf_counter() - begin) * 1e3
            await prefill.first_token(command.request_id, 50, finish=STOP, prefill_compute_ms=took_ms)
            await prefill.report(num_free_blocks=100, num_total_blocks=100)


async def offer(router: Router, name: str, rate: float, seconds: float) -> tuple[float, list[float]]:
    """(requests/s that met the target, how long each refusal took in seconds) of an even stream."""
    good, refusals = 0, []

    async def one(number: int, at_s: float) -> None:
        nonlocal good
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        begin = time.perf_counter()
        try:
            running = router.ask(f"{name}-{number}")
            async for _ in deltas(running):
                good += time.perf_counter() - begin <= TARGET_S
        except Overloaded:  # 429
            refusals.append(time.perf_counter() - begin)

    start = time.perf_counter()
    await asyncio.gather(*(one(number, start + number / rate) for number in range(int(rate * seconds))))
    return good / seconds, refusals


@pytest.mark.slow
@pytest.mark.timing
async def test_at_three_times_the_capacity_goodput_stays_and_no_refusal_comes_late():
    prefill, decode = prefill_worker(), decode_worker()
    placement = {"max_queued_tokens": len(PROMPT) + 1}  # one waits at the worker, the others in the router
    async with Router([prefill], [decode], placement=placement, ttft_target_s=ROUTER_TARGET_S) as router:
        serving = [
            asyncio.create_task(reserve_all(decode)),
            asyncio.create_task(prefill_one_after_the_other(prefill)),
        ]
        await offer(router, "learn", 20, 1.0)
        at_capacity, _ = await offer(router, "full", 45, 3.0)
        await offer(router, "rising", 150, 1.0)  # how long such waits are is learnt from the first few
        router.metrics.refusals.clear()
        overloaded, refusals = await offer(router, "over", 150, 3.0)
        for task in serving:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert overloaded >= 0.9 * at_capacity
        assert len(refusals) > 100
        at_once = [took_s for took_s in refusals if took_s <= 0.05]
        assert len(at_once) >= 0.99 * len(refusals)
        assert max(refusals) <= ROUTER_TARGET_S + 0.05  # nobody waits for a 429 longer than for a first token
        assert router.metrics.refusals.count("arrival") >= 0.99 * len(refusals)
        assert router.dispatcher.num_active == router.dispatcher.num_waiting == 0
