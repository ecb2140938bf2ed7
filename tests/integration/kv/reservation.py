"""One reservation of a hand-off, as the tests that send to it from another process share it."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.receive_handoff import HandoffReceiver, ReceivedHandoff
from shared.kv.transfer import KVTransfer
from tests.integration.kv.conftest import Sides
from tests.integration.kv.far_side import BLOCK_BYTES, FIRST_TOKEN, NUM_TOKENS, UNTOUCHED, content
from tests.waiting import DEADLINE_S, until

NUM_BLOCKS = 8
RIGHT = 1
"""The ticket whose content the senders of the prompt send."""


class Reservation:
    """A receiver with memory of its own."""

    def __init__(self, transfer: KVTransfer, key: FleetKey | None = None) -> None:
        self.memory = {index: bytearray([UNTOUCHED]) * BLOCK_BYTES for index in range(NUM_BLOCKS)}
        buffers = {index: memoryview(block) for index, block in self.memory.items()}
        self.receiver = HandoffReceiver(transfer, ArrivalCheck(BLOCK_BYTES), buffers, NUM_TOKENS)
        self.receiver.fleet_key = key

    def right(self) -> list[int]:
        return [index for index, block in self.memory.items() if block == content(RIGHT, index, BLOCK_BYTES)]


async def ship(sides: Sides, ticket: int, indexes, content_of: int = RIGHT, **more) -> dict[str, int]:
    return await sides.far(
        "ship", address=sides.near.address.hex(), ticket=ticket, indexes=list(indexes), content_of=content_of, **more
    )


async def assert_a_second_sender_completes(sides: Sides, it: Reservation) -> None:
    """Three blocks by one sender, the others by its successor: all arrive."""
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(sides, ticket, range(3))
    await until(lambda: len(it.receiver.checksums) == 3)
    it.receiver.replace_sender()
    await receiving
    ticket, needed = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(sides, ticket, needed, finish=True)
    received = await receiving
    assert isinstance(received, ReceivedHandoff)
    assert received.first_token == FIRST_TOKEN
    assert it.right() == list(range(NUM_BLOCKS))
    assert not it.receiver.damaged


async def assert_a_replay_is_refused(sides: Sides, it: Reservation) -> None:
    """The same notes, blocks and trailer, once sealed for another ticket."""
    before, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    it.receiver.replace_sender()
    await receiving
    ticket, needed = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    sending = asyncio.create_task(ship(sides, ticket, needed, sealed_for=before, finish=True))
    with pytest.raises(TransferFailed, match="not from a worker of this fleet"):
        await receiving
    await sending
    assert not it.receiver.checksums
