"""Readers are woken together, in passes with pauses in proportion between them; a first token does not wait."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.router.dispatch import active_request as module
from services.router.dispatch.active_request import WriteCoalescer


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that `perf_counter` says."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


async def woken(reader: asyncio.Future[None]) -> None:
    async with asyncio.timeout(60):
        await reader


def readers(count: int) -> list[asyncio.Future[None]]:
    return [asyncio.get_running_loop().create_future() for _ in range(count)]


async def test_one_pass_wakes_all_that_wait_and_none_in_the_call() -> None:
    turns, waiting = WriteCoalescer(), readers(5)
    for reader in waiting:
        turns.take(reader)
    assert not any(reader.done() for reader in waiting)
    await woken(waiting[0])
    assert all(reader.done() for reader in waiting)


async def test_the_next_pass_waits_in_proportion_to_the_last_and_a_first_token_does_not(clock) -> None:
    turns = WriteCoalescer(pause=2.0)
    slow, later, first = readers(3)
    slow.add_done_callback(lambda _: clock.__setitem__(0, clock[0] + 0.02))  # a pass of 20 ms
    turns.take(slow)
    await woken(slow)
    for _ in range(3):
        await asyncio.sleep(0)
    began = time.monotonic()
    turns.take(later)
    turns.take(first, now=True)
    await woken(first)
    assert not later.done()
    await woken(later)
    assert time.monotonic() - began >= 0.035  # 40 ms; timers are a little early


async def test_what_comes_while_a_pass_is_written_goes_with_the_next_and_short_passes_pause_nobody(clock) -> None:
    turns = WriteCoalescer()
    one, two = readers(2)
    one.add_done_callback(lambda _: turns.take(two))
    turns.take(one)
    await woken(one)
    assert not two.done()
    await woken(two)
    assert clock == [100.0]


async def test_a_reader_that_was_cancelled_while_it_waited_is_passed_over() -> None:
    turns = WriteCoalescer()
    gone, there, last = readers(3)
    turns.take(gone)
    turns.take(there)
    gone.cancel()
    await woken(there)
    assert gone.cancelled()
    turns.take(last)
    await woken(last)
