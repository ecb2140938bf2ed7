"""Tasks end although something in them swallows a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from shared.tasks import end_task
from tests.waiting import DEADLINE_S


async def test_a_swallowed_cancellation_is_asked_for_again() -> None:
    swallowed = asyncio.Event()

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed.is_set():
                    raise
                swallowed.set()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        await end_task(task)
    assert swallowed.is_set()
    assert task.cancelled()


async def test_an_error_of_the_task_is_told_and_an_ended_task_left_alone() -> None:
    async def fails() -> None:
        raise ValueError("told")

    async def ends() -> int:
        return 1

    failing = asyncio.create_task(fails())
    await asyncio.wait({failing})
    with pytest.raises(ValueError, match="told"):
        await end_task(failing)
    done = asyncio.create_task(ends())
    await done
    await end_task(done)
    assert done.result() == 1
