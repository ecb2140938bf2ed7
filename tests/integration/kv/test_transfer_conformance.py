"""What every `KVTransfer` does, seen from both sides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from shared.errors import TransferFailed
from shared.kv.transfer import TRAILER_INDEX, new_ticket
from tests.integration.kv.conftest import Sides
from tests.integration.kv.far_side import TRAILER_BYTES, Memory, content

SIZES = [100, 5_000, 20_000, 300_000]
"""Short, copied and rendezvous messages on each of UCX's transports."""


def blocks(num: int) -> list[tuple[int, int]]:
    return [(index, SIZES[index % len(SIZES)]) for index in range(num)]


async def send_trailer(sides: Sides, ticket: int) -> None:
    data = content(ticket, TRAILER_INDEX, TRAILER_BYTES)
    await sides.near.send(sides.address, ticket, TRAILER_INDEX, memoryview(data))


def send_blocks(sides: Sides, ticket: int, sizes: list[tuple[int, int]]) -> asyncio.Future[list[None]]:
    """Starts at the next turn of the loop."""
    return asyncio.gather(
        *(
            sides.near.send(sides.address, ticket, index, memoryview(content(ticket, index, num_bytes)))
            for index, num_bytes in sizes
        )
    )


async def test_many_blocks_arrive_whole_whatever_their_order(sides: Sides) -> None:
    ticket, sizes = new_ticket(), blocks(150)
    memory = Memory(sizes)
    incoming = sides.near.expect(ticket, memory.buffers, TRAILER_BYTES)
    shuffled = random.Random(0).sample(sizes, len(sizes))
    sending = asyncio.create_task(
        sides.far("send", address=sides.near.address.hex(), ticket=ticket, sizes=shuffled, trailer=True)
    )
    assert await incoming.trailer() == content(ticket, TRAILER_INDEX, TRAILER_BYTES)
    await incoming.blocks([index for index, _ in sizes])
    assert len(memory.holding(ticket)) == len(sizes)
    await sending
    await sides.near.cancel(ticket)
    assert len(memory.holding(ticket)) == len(sizes)


async def test_a_send_before_its_receive_waits_for_it(sides: Sides) -> None:
    ticket, sizes = new_ticket(), blocks(8)
    sending = send_blocks(sides, ticket, sizes)
    big = send_blocks(sides, ticket, [(8, 300_000)])
    await send_trailer_elsewhere(sides)
    assert not big.done()
    await sides.far("expect", ticket=ticket, sizes=[*sizes, (8, 300_000)])
    await sending
    await big
    await send_trailer(sides, ticket)
    assert await sides.far("arrived", ticket=ticket, indexes=list(range(9))) == list(range(9))


async def send_trailer_elsewhere(sides: Sides) -> None:
    """Returns when the far side has seen everything that was sent to it before."""
    ticket = new_ticket()
    await sides.far("expect", ticket=ticket, sizes=[])
    await send_trailer(sides, ticket)
    await sides.far("arrived", ticket=ticket, indexes=[])


async def test_tickets_in_both_directions_do_not_mix(sides: Sides) -> None:
    sizes = blocks(12)
    incoming, memories = {}, {}
    tasks: list[Awaitable[Any]] = []
    for _ in range(4):
        inward, outward = new_ticket(), new_ticket()
        memories[inward] = Memory(sizes)
        incoming[inward] = sides.near.expect(inward, memories[inward].buffers, TRAILER_BYTES)
        await sides.far("expect", ticket=outward, sizes=sizes)
        tasks += [
            sides.far("send", address=sides.near.address.hex(), ticket=inward, sizes=sizes, trailer=True),
            send_blocks(sides, outward, sizes),
            send_trailer(sides, outward),
            sides.far("arrived", ticket=outward, indexes=list(range(12))),
            incoming[inward].blocks(range(12)),
        ]
    results = await asyncio.gather(*tasks)
    assert results.count(list(range(12))) == 4
    assert all(memory.holding(ticket) == list(range(12)) for ticket, memory in memories.items())


async def test_a_trailer_may_overtake_blocks(sides: Sides) -> None:
    ticket, sizes = new_ticket(), blocks(4)
    memory = Memory(sizes)
    incoming = sides.near.expect(ticket, memory.buffers, TRAILER_BYTES)
    to = sides.near.address.hex()
    await sides.far("send", address=to, ticket=ticket, sizes=[], trailer=True)
    await incoming.trailer()
    waiting = asyncio.create_task(incoming.blocks([3, 1]))
    assert memory.untouched() == [0, 1, 2, 3]
    await sides.far("send", address=to, ticket=ticket, sizes=[sizes[1], sizes[3]])
    await waiting
    assert memory.holding(ticket) == [1, 3]
    assert memory.untouched() == [0, 2]


async def test_trailers_come_one_after_the_other_and_may_be_shorter(sides: Sides) -> None:
    ticket, sizes = new_ticket(), blocks(3)
    incoming = sides.near.expect(ticket, Memory(sizes).buffers, 2 * TRAILER_BYTES)
    to = sides.near.address.hex()
    for count in range(1, 4):
        await sides.far("send", address=to, ticket=ticket, sizes=sizes[count - 1 : count], trailer=True)
        trailer = content(ticket, TRAILER_INDEX, TRAILER_BYTES)
        assert await incoming.trailer() == trailer.ljust(2 * TRAILER_BYTES, b"\0")
        await incoming.blocks([count - 1])
        assert [incoming.arrived(index) for index, _ in sizes] == [index < count for index in range(3)]
        if count < 3:
            incoming.expect_another_trailer()
    await sides.near.cancel(ticket)
    assert all(incoming.arrived(index) for index, _ in sizes)


async def test_cancel_leaves_pending_memory_byte_for_byte_and_lets_late_senders_finish(sides: Sides) -> None:
    ticket, sizes = new_ticket(), blocks(8)
    memory = Memory(sizes)
    incoming = sides.near.expect(ticket, memory.buffers, TRAILER_BYTES)
    to = sides.near.address.hex()
    await sides.far("send", address=to, ticket=ticket, sizes=sizes[:2])
    await incoming.blocks([0, 1])
    await sides.near.cancel(ticket)
    assert memory.holding(ticket) == [0, 1]
    assert memory.untouched() == [2, 3, 4, 5, 6, 7]
    await sides.far("send", address=to, ticket=ticket, sizes=sizes[2:], trailer=True)
    await sides.far("send", address=to, ticket=ticket, sizes=sizes[2:])
    assert memory.untouched() == [2, 3, 4, 5, 6, 7]


async def test_cancel_fails_those_who_wait(sides: Sides) -> None:
    ticket = new_ticket()
    incoming = sides.near.expect(ticket, Memory(blocks(2)).buffers, TRAILER_BYTES)
    waiting = [asyncio.create_task(incoming.trailer()), asyncio.create_task(incoming.blocks([0, 1]))]
    await asyncio.sleep(0)
    await asyncio.gather(sides.near.cancel(ticket), sides.near.cancel(ticket))
    for task in waiting:
        with pytest.raises(TransferFailed):
            await task


async def test_cancel_in_the_midst_of_a_hand_off_is_final(sides: Sides) -> None:
    to = sides.near.address.hex()
    for taken in (0, 1, 5, 20, 60):
        ticket, sizes = new_ticket(), blocks(64)
        memory = Memory(sizes)
        incoming = sides.near.expect(ticket, memory.buffers, TRAILER_BYTES)
        sending = asyncio.create_task(sides.far("send", address=to, ticket=ticket, sizes=sizes, trailer=True))
        await incoming.blocks(range(taken))
        await sides.near.cancel(ticket)
        held, untouched = memory.holding(ticket), memory.untouched()
        assert sorted(held + untouched) == list(range(64))
        await sending
        assert (memory.holding(ticket), memory.untouched()) == (held, untouched)


async def test_a_waiter_may_be_cancelled_and_come_back(sides: Sides) -> None:
    ticket, sizes = new_ticket(), blocks(4)
    memory = Memory(sizes)
    incoming = sides.near.expect(ticket, memory.buffers, TRAILER_BYTES)
    waiting = asyncio.create_task(incoming.blocks(range(4)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    await sides.far("send", address=sides.near.address.hex(), ticket=ticket, sizes=sizes)
    await incoming.blocks(range(4))
    assert memory.holding(ticket) == [0, 1, 2, 3]


async def test_a_block_that_nobody_asked_for_is_an_error(sides: Sides) -> None:
    ticket = new_ticket()
    incoming = sides.near.expect(ticket, Memory(blocks(2)).buffers, TRAILER_BYTES)
    with pytest.raises(TransferFailed, match="block 7"):
        await incoming.blocks([7])
    await sides.near.cancel(ticket)


async def test_a_block_that_is_too_long_fails_at_its_receiver_alone(sides: Sides) -> None:
    ticket = new_ticket()
    memory = Memory([(0, 5_000), (1, 5_000)])
    incoming = sides.near.expect(ticket, memory.buffers, TRAILER_BYTES)
    await sides.far(
        "send", address=sides.near.address.hex(), ticket=ticket, sizes=[(0, 6_000), (1, 300_000)], trailer=True
    )
    for index in (0, 1):
        with pytest.raises(TransferFailed):
            await incoming.blocks([index])
    await incoming.trailer()


async def test_an_unknown_ticket_can_be_cancelled(sides: Sides) -> None:
    await sides.near.cancel(new_ticket())


async def test_counters_count_blocks_each_once_and_trailers_apart(sides: Sides) -> None:
    sizes = blocks(8)
    total = sum(num_bytes for _, num_bytes in sizes)
    inward, outward = new_ticket(), new_ticket()
    incoming = sides.near.expect(inward, Memory([*sizes, (8, 50)]).buffers, TRAILER_BYTES)
    await sides.far("send", address=sides.near.address.hex(), ticket=inward, sizes=sizes, trailer=True)
    await incoming.trailer()
    await incoming.blocks(range(8))
    await incoming.blocks(range(8))
    await sides.near.cancel(inward)
    await sides.far("expect", ticket=outward, sizes=sizes[:5])
    await send_blocks(sides, outward, sizes[:5])
    await send_trailer(sides, outward)
    counters = sides.near.counters
    assert (counters.blocks_received, counters.bytes_received) == (8, total)
    assert (counters.blocks_sent, counters.bytes_sent) == (5, sum(num_bytes for _, num_bytes in sizes[:5]))
    assert (counters.notes_sent, counters.note_bytes_sent) == (1, TRAILER_BYTES)


async def test_drop_peer_fails_its_sends_and_later_ones_reach_it_again(sides: Sides) -> None:
    lost, ticket = new_ticket(), new_ticket()
    sending = send_blocks(sides, lost, [(0, 300_000), (1, 300_000)])
    await asyncio.sleep(0)
    sides.near.drop_peer(sides.address)
    with pytest.raises(TransferFailed):
        await sending
    sides.near.drop_peer(sides.address)
    await sides.far("expect", ticket=ticket, sizes=blocks(4))
    await send_blocks(sides, ticket, blocks(4))
    await send_trailer(sides, ticket)
    assert await sides.far("arrived", ticket=ticket, indexes=[0, 1, 2, 3]) == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["empty", "foreign", "cut", "flipped"])
async def test_a_bad_address_fails_the_send(sides: Sides, damage: str) -> None:
    address = bytearray(sides.address)
    bad = {
        "empty": b"",
        "foreign": b"\x07" * 200,
        "cut": bytes(address[:-1]),
        "flipped": bytes([*address[:-3], address[-3] ^ 1, *address[-2:]]),
    }[damage]
    with pytest.raises(TransferFailed):
        await sides.near.send(bad, new_ticket(), 0, memoryview(b"x" * 100))


async def test_close_fails_what_is_under_way_and_can_be_repeated(sides: Sides) -> None:
    loop = asyncio.get_running_loop()
    memory = Memory(blocks(3))
    incoming = sides.near.expect(new_ticket(), memory.buffers, TRAILER_BYTES)
    await sides.near.cancel(new_ticket())
    cancelled = new_ticket()
    sides.near.expect(cancelled, Memory(blocks(1)).buffers, TRAILER_BYTES)
    await sides.near.cancel(cancelled)
    under_way: list[asyncio.Future[Any]] = [
        send_blocks(sides, new_ticket(), [(0, 300_000)]),
        asyncio.create_task(incoming.blocks([0])),
        asyncio.create_task(incoming.trailer()),
    ]
    await asyncio.sleep(0)
    started = loop.time()
    await asyncio.gather(sides.near.close(), sides.near.close())
    await sides.near.close()
    assert loop.time() - started < 1.0
    for task in under_way:
        with pytest.raises(TransferFailed):
            await task
    assert memory.untouched() == [0, 1, 2]


async def test_nothing_goes_after_close(sides: Sides) -> None:
    await sides.near.close()
    with pytest.raises(TransferFailed, match="not open"):
        await send_blocks(sides, new_ticket(), blocks(1))
    with pytest.raises(TransferFailed, match="not open"):
        sides.near.expect(new_ticket(), [], TRAILER_BYTES)
    await sides.near.cancel(new_ticket())
    sides.near.drop_peer(sides.address)
