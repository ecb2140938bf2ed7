"""Both sides of a hand-off over the plane within one process: what arrives, what is released, how failures end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from shared.errors import PeerUnreachable, TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.receive_handoff import (
    HandoffReceiver,
    MemoryLost,
    ReceivedHandoff,
    SenderLeft,
    end_receives,
    receive_trailer,
)
from shared.kv.handoff.shipment import Shipment, encode_note, encode_trailer, trailer_bytes
from shared.kv.pool import OutgoingBlock
from shared.kv.seal import Purpose
from shared.kv.transfer import TRAILER_INDEX
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.local_transfer import LocalPlane, LocalTransfer
from tests.waiting import until

TICKET = 5
DEADLINE_S = 300.0
NOW_S = 0.01  # a time-out that is meant to pass
NUM_TOKENS, BLOCK_BYTES = 48, 8

Blocks = Sequence[tuple[int, memoryview]]


class Pair:
    """A sender with a pool of blocks, block n filled with the byte n, and a receiver with empty memory."""

    def __init__(self, key: FleetKey | None = None) -> None:
        self.key = key
        self.plane = LocalPlane()
        self.sender, self.receiver = LocalTransfer(self.plane), LocalTransfer(self.plane)
        self.pool = [bytes([n]) * BLOCK_BYTES for n in range(20)]
        self.released: list[int] = []  # block ids in order
        self.arrived: dict[int, bytearray] = {}  # by block index
        self.check = ArrivalCheck(BLOCK_BYTES)
        self.ticket = TICKET

    async def __aenter__(self) -> Pair:
        await self.sender.start()
        await self.receiver.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sender.close()
        await self.receiver.close()

    async def memory(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.pool[block_id]) for block_id in block_ids]

    def shipment(self, num_needed: int = 3, timeout_s: float = DEADLINE_S) -> Shipment:
        return Shipment(
            self.sender,
            self.receiver.address,
            self.ticket,
            num_needed,
            self.memory,
            lambda blocks: self.released.extend(block.block_id for block in blocks),
            timeout_s,
            seal=None if self.key is None else self.key.seal(Purpose.HANDOFF, self.ticket, BLOCK_BYTES),
        )

    def expect(self, *indexes: int):
        """Posts receives for these blocks and for the trailer."""
        self.arrived = {index: bytearray(BLOCK_BYTES) for index in indexes}
        buffers = [(index, memoryview(data)) for index, data in self.arrived.items()]
        return self.receiver.expect(TICKET, buffers, trailer_bytes(len(indexes)))

    def received(self, *indexes: int, num_tokens: int = NUM_TOKENS, timeout_s: float = DEADLINE_S):
        """The receiver's side, as a task."""
        self.arrived = {index: bytearray(BLOCK_BYTES) for index in indexes}
        buffers = {index: memoryview(data) for index, data in self.arrived.items()}
        self.inbox = HandoffReceiver(self.receiver, self.check, buffers, num_tokens, self.key)
        self.ticket, needed = self.inbox.open()
        assert needed == list(indexes)
        return asyncio.create_task(self.inbox.receive(timeout_s))

    def block(self, index: int, block_id: int) -> OutgoingBlock:
        """A block of the pool as one of the prompt."""
        return OutgoingBlock("s", index, block_id, self.check.checksum(memoryview(self.pool[block_id])))


@pytest.mark.parametrize("finished", [True, False])
async def test_every_block_arrives_at_its_index_with_its_checksum(finished: bool) -> None:
    async with Pair() as pair:
        receiving = pair.received(0, 1, 7)
        async with pair.shipment() as shipment:
            for index, block_id in ((7, 3), (0, 11), (1, 4)):
                shipment.add(pair.block(index, block_id))
            assert shipment.num_blocks == 3
            await shipment.finish(99, NUM_TOKENS, finished=finished)
        async with asyncio.timeout(DEADLINE_S):
            assert await receiving == ReceivedHandoff(99, finished)
        ids = {7: 3, 0: 11, 1: 4}
        assert pair.inbox.checksums == {i: pair.block(i, block_id).checksum for i, block_id in ids.items()}
        assert {index: data[0] for index, data in pair.arrived.items()} == {7: 3, 0: 11, 1: 4}
        assert sorted(pair.released) == [3, 4, 11]


async def test_a_hand_off_has_one_trailer_and_it_is_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Pair() as pair:
        indexes: list[int] = []
        send = pair.sender.send_blocks

        async def noting(address: bytes, ticket: int, blocks: Blocks, on_taken: Callable[[], None]) -> None:
            indexes.extend(index for index, _ in blocks)
            await send(address, ticket, blocks, on_taken)

        monkeypatch.setattr(pair.sender, "send_blocks", noting)
        receiving = pair.received(0)
        async with pair.shipment(1) as shipment:
            shipment.add(pair.block(0, 3))
            await shipment.finish(1, NUM_TOKENS, finished=False)
        await receiving
        assert indexes == [0, TRAILER_INDEX]


async def test_both_sides_count_the_same_messages_from_the_first_to_the_trailer() -> None:
    async with Pair() as pair:
        unopened = HandoffReceiver(pair.receiver, pair.check, {}, NUM_TOKENS)
        assert (unopened.num_arrived, unopened.is_waiting) == (0, False)
        receiving = pair.received(0, 1)
        assert (pair.inbox.num_arrived, pair.inbox.is_waiting) == (0, True)
        async with pair.shipment(2) as shipment:
            shipment.add_noted([pair.block(0, 3)])
            await shipment.sent()
            async with asyncio.timeout(DEADLINE_S):
                while pair.inbox.num_arrived < 2:
                    await asyncio.sleep(0)
            assert (shipment.num_posted, shipment.num_taken, pair.inbox.is_waiting) == (2, 1, True)
            shipment.add(pair.block(1, 4))
            await shipment.finish(1, NUM_TOKENS, finished=False)
        await receiving
        assert pair.inbox.num_arrived == shipment.num_posted == 4
        assert not pair.inbox.is_waiting


async def test_a_receiver_that_is_given_up_ends_its_hand_off_with_that_error_and_gets_no_trailer() -> None:
    async with Pair() as pair:
        receiving = pair.received(0, 1)
        pair.ticket ^= 1  # what is sent is never taken
        shipment = pair.shipment(2)
        shipment.add_noted([pair.block(0, 3)])
        finishing = asyncio.create_task(shipment.finish(1, NUM_TOKENS, finished=False))
        async with asyncio.timeout(DEADLINE_S):
            while shipment.num_posted < 2:
                await asyncio.sleep(0)
        shipment.give_up(PeerUnreachable("cut"))
        with pytest.raises(PeerUnreachable):
            await finishing
        assert (pair.released, shipment.num_posted) == ([3], 2)
        pair.inbox.replace_sender()
        assert await receiving is SenderLeft.REPLACED


async def test_a_hand_off_without_blocks_is_its_trailer_alone() -> None:
    async with Pair() as pair:
        receiving = pair.received()
        await pair.shipment(0).finish(1, NUM_TOKENS, finished=False)
        assert await receiving == ReceivedHandoff(1, False)


async def test_what_leaves_its_block_without_an_end_is_aborted() -> None:
    async with Pair() as pair:
        receiving = pair.received(0, 1, 2)
        async with pair.shipment() as shipment:
            shipment.add(pair.block(0, 3))
        assert await receiving is SenderLeft.ABORTED
        assert pair.released == [3]


async def test_an_exception_of_the_sender_aborts_and_goes_on() -> None:
    async with Pair() as pair:
        receiving = pair.received(0, 1, 2)
        with pytest.raises(KeyError):
            async with pair.shipment():
                raise KeyError
        assert await receiving is SenderLeft.ABORTED


async def test_a_hand_off_that_failed_to_finish_is_not_aborted_behind_it() -> None:
    async with Pair() as pair:
        pair.plane.leave(pair.receiver.address)
        async with pair.shipment() as shipment:
            shipment.add(pair.block(0, 3))
            with pytest.raises(TransferFailed, match="nothing is at the peer"):
                await shipment.finish(1, NUM_TOKENS, finished=False)
        assert pair.released == [3]
        assert pair.sender.counters.blocks_sent == 0


async def test_blocks_behind_one_that_failed_are_released_unsent() -> None:
    async with Pair() as pair:
        address = pair.receiver.address
        pair.plane.leave(address)
        shipment = pair.shipment()
        shipment.add(pair.block(0, 3))
        while not pair.released:  # the first send fails
            await asyncio.sleep(0)
        pair.plane._transfers[address] = pair.receiver  # a process that comes back at the same address
        pair.expect(0, 1)
        shipment.add(pair.block(1, 4))
        with pytest.raises(TransferFailed, match="nothing is at the peer"):
            await shipment.finish(1, NUM_TOKENS, finished=False)
        assert sorted(pair.released) == [3, 4]
        assert pair.sender.counters.blocks_sent == 0


async def test_an_abort_towards_a_dead_receiver_is_silent_and_releases() -> None:
    async with Pair() as pair:
        pair.plane.leave(pair.receiver.address)
        shipment = pair.shipment()
        await shipment.abort()  # the trailer cannot leave
        shipment.add(pair.block(0, 3))
        await shipment.abort()  # nor can the block
        assert pair.released == [3]


async def test_a_receiver_that_takes_no_block_is_given_up() -> None:
    async with Pair() as pair:
        shipment = pair.shipment(timeout_s=NOW_S)
        shipment.add(pair.block(0, 3))
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(TransferFailed, match="the peer is gone"):
                await shipment.finish(1, NUM_TOKENS, finished=False)
        assert pair.released == [3]


async def test_a_receiver_that_takes_no_trailer_is_given_up() -> None:
    async with Pair() as pair, asyncio.timeout(DEADLINE_S):
        with pytest.raises(TransferFailed, match="the peer is gone"):
            await pair.shipment(0, timeout_s=NOW_S).finish(1, NUM_TOKENS, finished=False)


async def test_sends_to_a_receiver_that_is_known_to_be_gone_fail_at_once() -> None:
    async with Pair() as pair:
        shipment = pair.shipment()
        shipment.add(pair.block(0, 3))
        await asyncio.sleep(0)  # the send waits for its receive
        shipment.drop_receiver()
        async with asyncio.timeout(DEADLINE_S / 2):
            with pytest.raises(TransferFailed, match="the peer is gone"):
                await shipment.finish(1, NUM_TOKENS, finished=False)
        assert pair.released == [3]


# --- the receiver


@pytest.mark.parametrize(
    ("sent", "num_tokens", "message"),
    [
        ([0, 1], NUM_TOKENS, "1 of 3 blocks missing and 48 of 48 tokens"),
        ([], NUM_TOKENS, "3 of 3 blocks missing and 48 of 48 tokens"),
        ([0, 1, 7], NUM_TOKENS - 1, "0 of 3 blocks missing and 47 of 48 tokens"),
        ([0, 1, 7], NUM_TOKENS + 1, "0 of 3 blocks missing and 49 of 48 tokens"),
    ],
)
async def test_an_incomplete_hand_off_is_refused(sent: list[int], num_tokens: int, message: str) -> None:
    async with Pair() as pair:
        receiving = pair.received(0, 1, 7)
        shipment = pair.shipment()
        for index in sent:
            shipment.add(pair.block(index, index + 1))
        await shipment.finish(1, num_tokens, finished=False)
        with pytest.raises(TransferFailed, match=message):
            await receiving


async def test_a_trailer_that_names_a_block_nobody_expects_is_refused() -> None:
    async with Pair() as pair:
        receiving = pair.received(0)
        body = types_pb2.HandoffTrailer(num_computed_tokens=NUM_TOKENS, block_indexes=[4], checksums=[1])
        await pair.sender.send(
            pair.receiver.address, pair.ticket, TRAILER_INDEX, memoryview(bytearray(encode_trailer(body, 1)))
        )
        with pytest.raises(TransferFailed, match="names block 4"):
            await receiving


@pytest.mark.parametrize("key", [None, FleetKey(b"hunter2hunter2hunter2")], ids=["open", "sealed"])
async def test_a_second_sender_sends_what_the_first_one_left_missing(key: FleetKey | None) -> None:
    async with Pair(key) as pair:
        receiving = pair.received(0, 1, 7)
        first = pair.shipment()
        first.add_noted([pair.block(0, 3)])
        async with asyncio.timeout(DEADLINE_S):
            while not pair.inbox.checksums:
                await asyncio.sleep(0)
        assert not pair.inbox.is_replaced
        pair.inbox.replace_sender()
        assert await receiving is SenderLeft.REPLACED is pair.inbox.left
        assert pair.inbox.is_replaced
        await pair.inbox.replaced(NOW_S)
        before, (pair.ticket, needed) = pair.ticket, pair.inbox.open()
        assert (needed, pair.inbox.left, pair.inbox.is_replaced) == ([1, 7], None, False)
        assert pair.ticket != before
        receiving = asyncio.create_task(pair.inbox.receive(DEADLINE_S))
        async with pair.shipment(2) as second:
            second.add_noted([pair.block(1, 11)])
            second.add_noted([pair.block(7, 4)])
            await second.finish(99, NUM_TOKENS, finished=False)
        assert await receiving == ReceivedHandoff(99, False)
        assert {index: data[0] for index, data in pair.arrived.items()} == {0: 3, 1: 11, 7: 4}
        assert pair.inbox.missing == []
        await first.abort()


@pytest.mark.parametrize(
    ("num_sent", "left", "reason"),
    [(1, SenderLeft.ABORTED, "no other one came"), (3, SenderLeft.FAILED, "a message of 103 bytes for memory of 77")],
)
async def test_a_sender_that_left_and_is_not_replaced_is_an_error(num_sent: int, left: SenderLeft, reason: str) -> None:
    async with Pair() as pair:
        receiving = pair.received(0)
        async with pair.shipment(num_sent):
            pass
        assert await receiving is left
        with pytest.raises(TransferFailed, match=reason):
            await pair.inbox.replaced(NOW_S)


async def test_a_silent_sender_is_given_up_and_can_write_no_more() -> None:
    async with Pair() as pair:
        with pytest.raises(TransferFailed, match=r"nothing of the hand-off came for 0.01 s") as failed:
            await pair.received(0, timeout_s=NOW_S)
        assert not isinstance(failed.value, MemoryLost)
        assert failed.value.details["limit"] == NOW_S
        async with asyncio.timeout(DEADLINE_S):
            await pair.sender.send(pair.receiver.address, pair.ticket, 0, memoryview(pair.pool[9]))
        assert pair.arrived[0] == bytes(BLOCK_BYTES)


async def test_each_note_gives_the_next_message_its_time() -> None:
    """A long prompt's chunks come one after the other, however long all of them take."""
    async with Pair() as pair:
        receiving = pair.received(0, 1)
        async with pair.shipment(2) as shipment:
            await until(lambda: pair.inbox._limit is not None)
            limit = pair.inbox._limit
            assert limit is not None
            ends_s = limit.when()
            assert ends_s is not None
            shipment.add_noted([pair.block(0, 3)])
            await until(lambda: (limit.when() or 0.0) > ends_s)
            shipment.add(pair.block(1, 4))
            await shipment.finish(99, NUM_TOKENS, finished=False)
        assert await receiving == ReceivedHandoff(99, finished=False)


async def test_the_time_counts_for_the_blocks_too() -> None:
    async with Pair() as pair:
        incoming = pair.expect(0)
        body = types_pb2.HandoffTrailer(num_computed_tokens=NUM_TOKENS, block_indexes=[0], checksums=[1])
        await pair.sender.send(
            pair.receiver.address, TICKET, TRAILER_INDEX, memoryview(bytearray(encode_trailer(body, 1)))
        )
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(TransferFailed, match="did not end within"):
                await receive_trailer(pair.receiver, TICKET, incoming, NOW_S)


async def test_a_receive_that_is_cancelled_ends_its_receives() -> None:
    async with Pair() as pair:
        receiving = pair.received(0)
        await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        async with asyncio.timeout(DEADLINE_S):
            await pair.sender.send(pair.receiver.address, pair.ticket, 0, memoryview(pair.pool[9]))
        assert pair.arrived[0] == bytes(BLOCK_BYTES)


async def test_a_receive_that_is_cancelled_twice_leaves_no_check_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block that arrives while its receives are ended: it may be opened in place, where memory is free by then."""
    async with Pair() as pair:
        checking, go_on = asyncio.Event(), asyncio.Event()

        async def sound(blocks: Sequence[object], _seal: object) -> list[bool]:
            checking.set()
            await go_on.wait()
            return [True] * len(blocks)

        end = pair.receiver.cancel

        async def cancel(ticket: int) -> None:
            await pair.sender.send(pair.receiver.address, ticket, 0, memoryview(pair.pool[9]))
            for _ in range(10):  # turns of the event loop
                await asyncio.sleep(0)
            await end(ticket)

        monkeypatch.setattr(pair.check, "sound", sound)
        monkeypatch.setattr(pair.receiver, "cancel", cancel)
        receiving = pair.received(0)
        note = types_pb2.HandoffTrailer(more=True, block_indexes=[0], checksums=[1])
        await pair.sender.send(
            pair.receiver.address, pair.ticket, TRAILER_INDEX, memoryview(bytearray(encode_note(note)))
        )
        for _ in range(3):
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait((receiving,))
        assert receiving.cancelled()
        assert not checking.is_set()
        go_on.set()


async def test_a_cancel_while_receives_end_waits_for_them_and_says_what_became_of_the_memory() -> None:
    class Slow(LocalTransfer):
        def __init__(self, error: TransferFailed | None) -> None:
            super().__init__(LocalPlane())
            self.begun, self.end = asyncio.Event(), asyncio.Event()
            self.error = error

        async def cancel(self, ticket: int) -> None:
            self.begun.set()
            await self.end.wait()
            if self.error is not None:
                raise self.error

    for error, raised in ((None, asyncio.CancelledError), (TransferFailed("it has begun to arrive"), MemoryLost)):
        transfer = Slow(error)
        ending = asyncio.create_task(end_receives(transfer, TICKET))
        await transfer.begun.wait()
        ending.cancel()
        await asyncio.wait((ending,), timeout=NOW_S)
        assert not ending.done(), "the memory comes first"
        transfer.end.set()
        with pytest.raises(raised):
            await ending


async def test_memory_that_a_sender_may_still_write_is_lost() -> None:
    class Stuck(LocalTransfer):
        async def cancel(self, ticket: int) -> None:
            raise TransferFailed(f"ticket {ticket} has begun to arrive")

    with pytest.raises(MemoryLost, match="ticket 5 has begun to arrive"):
        await end_receives(Stuck(LocalPlane()), TICKET)


def test_a_checksum_of_0_is_known_and_none_is_not() -> None:
    assert OutgoingBlock("s", 0, 1, 0).checksum == 0
    with pytest.raises(AssertionError, match="block 8 has no checksum"):
        _ = OutgoingBlock("s", 0, 8, None).checksum
