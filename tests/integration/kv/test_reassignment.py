"""One reservation, several senders in other processes: each sends what is missing, and late ones write nowhere."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from shared.errors import TransferFailed
from shared.kv.handoff.receive_handoff import ReceivedHandoff, SenderLeft
from tests.integration.kv.conftest import BY_NETWORK, FAR_HOST, FarProcess, Sides
from tests.integration.kv.far_side import BLOCK_BYTES, FIRST_TOKEN, UNTOUCHED
from tests.integration.kv.reservation import LATE, NUM_BLOCKS, Reservation, ship
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow


@pytest.fixture
async def second(doomed: Sides) -> AsyncIterator[Sides]:
    """Another sender, on the host of the doomed one."""
    far = doomed.near._host_id != _this_host()
    process = FarProcess(FAR_HOST, environment=BY_NETWORK) if far else FarProcess(None)
    try:
        async with process.connected() as far:
            yield Sides(doomed.near, far, bytes.fromhex(await far("address")), process)
    finally:
        process.end(killed=True)


def _this_host() -> bytes:
    from shared.kv.ucx.address import this_host

    return this_host()


async def test_a_second_sender_sends_what_the_killed_one_did_not(doomed: Sides, second: Sides) -> None:
    it = Reservation(doomed.near)
    ticket, needed = it.receiver.open()
    assert needed == list(range(NUM_BLOCKS))
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(doomed, ticket, [0, 1, 5])
    await until(lambda: len(it.receiver.checksums) == 3)
    os.kill(doomed.process.pid, signal.SIGKILL)
    it.receiver.replace_sender()
    assert await receiving is SenderLeft.REPLACED
    again, needed = it.receiver.open()
    assert again != ticket
    assert needed == [2, 3, 4, 6, 7]
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    before = doomed.near.counters.blocks_received
    await ship(second, again, needed, finish=True)
    assert await receiving == ReceivedHandoff(FIRST_TOKEN, finished=False)
    assert doomed.near.counters.blocks_received - before == len(needed)
    assert it.right() == list(range(NUM_BLOCKS))
    assert not it.receiver.missing


async def test_a_stopped_sender_that_comes_back_writes_nowhere(doomed: Sides, second: Sides) -> None:
    """Neither into blocks that the second sender fills, nor into those that it filled."""
    it = Reservation(doomed.near)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(doomed, ticket, [0, 1])
    await until(lambda: len(it.receiver.checksums) == 2)
    doomed.process.stop()
    late = asyncio.create_task(ship(doomed, ticket, range(2, NUM_BLOCKS), LATE, finish=True))
    await asyncio.sleep(0)  # its command is in the pipe
    it.receiver.replace_sender()
    assert await receiving is SenderLeft.REPLACED
    again, needed = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(second, again, [2, 3])
    await until(lambda: len(it.receiver.checksums) == 4)
    os.kill(doomed.process.pid, signal.SIGCONT)
    await late  # all of it was taken, and thrown away
    assert it.right() == [0, 1, 2, 3]
    assert all(it.memory[index] == bytes([UNTOUCHED]) * BLOCK_BYTES for index in needed[2:])
    await ship(second, again, needed[2:], finish=True)
    await receiving
    assert it.right() == list(range(NUM_BLOCKS))


@pytest.mark.parametrize("doomed", ["ucx"], indirect=True)
async def test_a_damaged_block_is_found_where_it_arrives_and_sent_again(doomed: Sides, second: Sides) -> None:
    it = Reservation(doomed.near)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(doomed, ticket, [0, 1, 2, 3], damaged=[2])
    await until(lambda: len(it.receiver.checksums) == 3)  # no trailer was sent
    assert it.receiver.damaged == {2}
    it.receiver.replace_sender()
    await receiving
    again, needed = it.receiver.open()
    assert needed == [2, 4, 5, 6, 7]
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(second, again, needed, finish=True)
    assert isinstance(await receiving, ReceivedHandoff)
    assert (it.receiver.damaged, it.receiver.num_damaged) == (set(), 1)
    assert it.right() == list(range(NUM_BLOCKS))


@pytest.mark.parametrize("doomed", ["ucx"], indirect=True)
async def test_a_sender_that_names_a_block_which_is_here_is_refused(doomed: Sides, second: Sides) -> None:
    it = Reservation(doomed.near)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(doomed, ticket, [0, 1])
    await until(lambda: len(it.receiver.checksums) == 2)
    it.receiver.replace_sender()
    await receiving
    again, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    sending = asyncio.create_task(ship(second, again, [1, 2], LATE))
    with pytest.raises(TransferFailed, match="block 1, which was not expected"):
        await receiving
    await sending
    assert it.right() == [0, 1]
