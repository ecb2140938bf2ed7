"""Commands about blocks and their answers, on the event loop."""

from __future__ import annotations

import asyncio

from services.worker.blocks.exchange_client import BlockExchangeClient
from shared.engine.messages import AdoptBlocks, BlocksAdopted, CacheFlushed, FlushCache, HoldBlocks


class Sent:
    """An engine that keeps what it is sent."""

    def __init__(self) -> None:
        self.commands: list[AdoptBlocks | FlushCache | HoldBlocks] = []

    def submit(self, command):
        self.commands.append(command)


def test_adopted_blocks_are_told_of_before_the_engines_next_event_in_the_order_of_the_commands():
    """The engine's events may come together: a first token behind them must find its fetched blocks counted."""
    engine, told = Sent(), []
    client = BlockExchangeClient(engine)
    client.adopt("f", {0: 7}, 0, lambda answer: told.append(("first", answer.indexes)))
    client.adopt("f", {1: 8}, 1, lambda answer: told.append(("second", answer.indexes)))
    assert [(command.checksums, command.num_damaged) for command in engine.commands] == [({0: 7}, 0), ({1: 8}, 1)]
    client.on_event(BlocksAdopted("f", (0,)))
    assert told == [("first", (0,))]
    client.on_event(BlocksAdopted("f", ()))
    assert told == [("first", (0,)), ("second", ())]


async def test_an_answer_whose_caller_was_cancelled_is_dropped():
    engine = Sent()
    client = BlockExchangeClient(engine)
    cancelled, asking = asyncio.create_task(client.flush()), asyncio.create_task(client.flush())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    for command, num_blocks in zip(engine.commands, (1, 2), strict=True):
        client.on_event(CacheFlushed(command.key, num_blocks))
    assert await asking == 2
    assert cancelled.cancelled()
