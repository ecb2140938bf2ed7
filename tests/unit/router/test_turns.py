"""Readers wake in order, a few a pass, and every pass lets the loop read first."""

from __future__ import annotations

import asyncio

from services.router.turns import Turns


async def test_a_pass_wakes_so_many_and_the_next_ones_the_rest_in_order() -> None:
    turns, loop = Turns(limit=2), asyncio.get_running_loop()
    readers = [loop.create_future() for _ in range(5)]
    for reader in readers:
        turns.take(reader)
    woken = []
    for _ in range(4):
        woken.append([reader.done() for reader in readers].count(True))
        await asyncio.sleep(0)
    assert woken == [0, 2, 4, 5]


async def test_a_reader_that_was_cancelled_while_it_waited_is_passed_over() -> None:
    turns, loop = Turns(limit=1), asyncio.get_running_loop()
    gone, there = loop.create_future(), loop.create_future()
    turns.take(gone)
    turns.take(there)
    gone.cancel()
    async with asyncio.timeout(5):
        await there
    assert gone.cancelled()
    last = loop.create_future()
    turns.take(last)
    async with asyncio.timeout(5):
        await last
