"""Work over blocks' bytes, shared between threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from shared.kv import block_memory
from shared.kv.block_memory import AT_ONCE_BYTES, MOST_PARTS, DeviceBlockIds, DeviceBytes, each_beside_loop, on_device

DEADLINE_S = 300.0
PART_BYTES = 2 * AT_ONCE_BYTES


def use_processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(block_memory.os, "sched_getaffinity", {0: set(range(count))}.__getitem__)  # 0: this process


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    use_processors(monkeypatch, 64)
    monkeypatch.setattr(block_memory, "PART_BYTES", PART_BYTES)


@pytest.mark.parametrize(
    ("num_processors", "num_bytes", "num_parts"),
    [(64, 1, 1), (64, PART_BYTES, 1), (64, 3 * PART_BYTES, 3), (64, 99 * PART_BYTES, MOST_PARTS),
     (6, 99 * PART_BYTES, 3), (3, 99 * PART_BYTES, 1)],
)  # fmt: skip
async def test_results_are_in_the_items_order_however_many_threads_share_them(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, num_bytes: int, num_parts: int
) -> None:
    use_processors(monkeypatch, num_processors)
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


class NoSums:
    """Blocks of a pool that no test reads from."""

    def of(self, block_ids: Sequence[int]) -> list[int]:
        raise AssertionError("nothing is read")

    def by_keys(self, block_ids: Sequence[int], keys: object) -> list[int]:
        raise AssertionError("nothing is read")


def test_a_gpus_blocks_are_known_by_their_ids_where_all_are_of_one_pool() -> None:
    pool, other = NoSums(), NoSums()
    blocks = [DeviceBytes(4096 * number, 4096, number, pool) for number in (3, 1)]
    assert on_device(blocks) == DeviceBlockIds(pool, [3, 1])
    assert on_device([memoryview(b"host")]) is None
    assert on_device([]) is None
    for odd in (DeviceBytes(0, 4096, 2, other), memoryview(b"host")):
        with pytest.raises(AssertionError):
            on_device([*blocks, odd])
