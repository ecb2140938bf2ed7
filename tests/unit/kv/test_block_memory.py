"""Work over blocks' bytes, shared between threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from shared.kv import block_memory
from shared.kv.block_memory import AT_ONCE_BYTES, each_beside_loop

DEADLINE_S = 300.0
PART_BYTES = 2 * AT_ONCE_BYTES


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_memory.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(block_memory, "PART_BYTES", PART_BYTES)


@pytest.mark.parametrize(
    ("num_bytes", "num_parts"), [(1, 1), (PART_BYTES, 1), (3 * PART_BYTES, 3), (99 * PART_BYTES, 4)]
)
async def test_results_are_in_the_items_order_however_many_threads_share_them(num_bytes: int, num_parts: int) -> None:
    parts: list[list[int]] = []

    def double(part: Sequence[int]) -> list[int]:
        parts.append(list(part))
        return [2 * item for item in part]

    memory = [memoryview(bytes(num_bytes))]
    assert await each_beside_loop(range(10), memory, double) == [2 * item for item in range(10)]
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(10))


async def test_an_error_or_a_cancel_comes_when_no_thread_reads_any_more() -> None:
    may_end, running, num_ended = threading.Event(), threading.Semaphore(0), 0

    def work(part: Sequence[int]) -> list[int]:
        nonlocal num_ended
        running.release()
        if 0 in part:
            raise ValueError("bad block")
        assert may_end.wait(DEADLINE_S)
        num_ended += 1
        return list(part)

    for wanted in (ValueError, asyncio.CancelledError):
        may_end.clear()
        num_ended = 0
        first = 0 if wanted is ValueError else 1
        memory = [memoryview(bytes(4 * PART_BYTES))]
        checking = asyncio.create_task(each_beside_loop(range(first, 8), memory, work))
        for _ in range(4):
            assert await asyncio.to_thread(running.acquire, timeout=DEADLINE_S)
        if wanted is asyncio.CancelledError:
            checking.cancel()
        done, _ = await asyncio.wait((checking,), timeout=0)
        assert not done
        may_end.set()
        with pytest.raises(wanted):
            await checking
        assert num_ended == (3 if wanted is ValueError else 4)
