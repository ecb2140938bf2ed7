"""Hand-offs with packed blocks: what arrives is the block, damage is found, and a link decides."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from shared.errors import TransferFailed
from shared.kernels.packing import reference
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.link_rate import MEASURED_BYTES, LinkRate
from shared.kv.handoff.receive_handoff import HandoffReceiver, ReceivedHandoff
from shared.kv.handoff.shipment import Shipment, encode_note, encode_trailer
from shared.kv.handoff.wire import Wire
from shared.kv.packing import BlockPacking, PackingRates
from shared.kv.pool import OutgoingBlock
from shared.kv.seal import Purpose, SealedBlock
from shared.kv.transfer import TRAILER_INDEX
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.local_transfer import LocalPlane, LocalTransfer
from tests.waiting import until

BLOCK_BYTES, NUM_TOKENS, DEADLINE_S = 32768, 48, 300.0
KEYS = [None, FleetKey(bytes(32)), FleetKey(bytes(32), encryption="aes-gcm")]


class ReferencePacker:
    def pack(self, numbers, out) -> int:
        packed = reference.pack(numbers)
        if len(packed) > len(out):
            return 0
        out[: len(packed)] = np.frombuffer(packed, np.uint8)
        return len(packed)

    def unpack(self, packed, numbers) -> None:
        numbers[:] = reference.unpack(packed.tobytes(), len(numbers))


class Damaging(LocalTransfer):
    """Flips a bit of block 1 on its way."""

    async def send_blocks(self, address, ticket, blocks, on_taken):
        changed = []
        for index, memory in blocks:
            data = bytearray(memory)
            data[len(data) // 2] ^= 4 * (index == 1)
            changed.append((index, memoryview(data)))
        await super().send_blocks(address, ticket, changed, on_taken)


def drawn(seed: int) -> bytes:
    wide = np.random.default_rng(seed).standard_normal(BLOCK_BYTES // 2, np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16).tobytes()


async def handed_off(key: FleetKey | None, sender_of=LocalTransfer, takes: bool = True):
    """Three blocks, the last of which does not shrink: (pool, receiver, what arrived, the outcome, sender)."""
    plane, packing = LocalPlane(), BlockPacking(ReferencePacker(), BLOCK_BYTES, "bfloat16")
    sender, receiver = sender_of(plane), LocalTransfer(plane)
    await sender.start()
    await receiver.start()
    pool = [drawn(0), drawn(1), np.random.default_rng(2).bytes(BLOCK_BYTES)]
    arrived = {index: bytearray(BLOCK_BYTES) for index in range(3)}
    check = ArrivalCheck(BLOCK_BYTES, packing if takes else None)
    inbox = HandoffReceiver(receiver, check, {i: memoryview(data) for i, data in arrived.items()}, NUM_TOKENS, key)
    ticket, _ = inbox.open()
    receiving = asyncio.create_task(inbox.receive(DEADLINE_S))

    async def memory(block_ids):
        return [memoryview(pool[block_id]) for block_id in block_ids]

    shipment = Shipment(
        sender, receiver.address, ticket, 3, memory, lambda _: None, DEADLINE_S,
        None if key is None else key.seal(Purpose.HANDOFF, ticket, BLOCK_BYTES),
        wire=Wire(packing, LinkRate(), 1e9, "on"),
    )  # fmt: skip
    try:
        blocks = [OutgoingBlock("s", i, i, check.checksum(memoryview(pool[i]))) for i in range(3)]
        shipment.add_noted(blocks[:2])
        shipment.add_noted(blocks[2:])
        finishing = asyncio.create_task(shipment.finish(9, NUM_TOKENS, finished=False))
        async with asyncio.timeout(DEADLINE_S):
            outcome = await receiving
            await finishing
        return pool, inbox, arrived, outcome, sender
    finally:
        shipment.drop_receiver()
        await asyncio.gather(finishing, return_exceptions=True)
        await sender.close()
        await receiver.close()


@pytest.mark.parametrize("key", KEYS)
async def test_packed_blocks_arrive_as_they_were_and_fewer_bytes_cross(key) -> None:
    pool, inbox, arrived, outcome, sender = await handed_off(key)
    assert outcome == ReceivedHandoff(9, False)
    assert [bytes(arrived[i]) for i in range(3)] == pool
    assert not inbox.damaged
    assert sorted(inbox.checksums) == [0, 1, 2]
    counters = sender.counters
    assert counters.blocks_packed == 2
    assert counters.bytes_sent + counters.bytes_saved == 3 * BLOCK_BYTES
    assert counters.bytes_saved > 2 * BLOCK_BYTES // 4


@pytest.mark.parametrize("key", KEYS)
async def test_a_damaged_packed_block_is_found(key) -> None:
    pool, inbox, arrived, _, _ = await handed_off(key, Damaging)
    assert inbox.damaged == {1}
    assert [bytes(arrived[i]) for i in (0, 2)] == [pool[0], pool[2]]


@pytest.mark.parametrize(("key", "packs"), [*((key, True) for key in KEYS), (KEYS[2], False)])
async def test_a_block_that_a_note_and_the_trailer_name_is_opened_once(key, packs: bool) -> None:
    """Note and trailer are read together, since the block before them comes late."""
    plane, packing = LocalPlane(), BlockPacking(ReferencePacker(), BLOCK_BYTES, "bfloat16")
    sender, receiver = LocalTransfer(plane), LocalTransfer(plane)
    await sender.start()
    await receiver.start()
    pool, arrived = [drawn(0), drawn(1)], {index: bytearray(BLOCK_BYTES) for index in range(2)}
    check = ArrivalCheck(BLOCK_BYTES, packing)
    inbox = HandoffReceiver(receiver, check, {i: memoryview(data) for i, data in arrived.items()}, NUM_TOKENS, key)
    ticket, _ = inbox.open()
    receiving = asyncio.create_task(inbox.receive(DEADLINE_S))
    seal = None if key is None else key.seal(Purpose.HANDOFF, ticket, BLOCK_BYTES)
    sums = [check.checksum(memoryview(block)) for block in pool]
    leaving = []
    for index, block in enumerate(pool):
        packed = packing.pack(memoryview(block)) if packs else memoryview(block)
        (closed,) = [SealedBlock(packed)] if seal is None else seal.close_blocks([(index, packed)])
        leaving.append((index, closed.wire))
        note = types_pb2.HandoffTrailer(
            more=True, block_indexes=[index], checksums=[sums[index]], packed_bytes=[packed.nbytes] * packs,
            block_tags=[closed.tag] if closed.tag else [],
        )  # fmt: skip
        await sender.send(receiver.address, ticket, TRAILER_INDEX, memoryview(encode_note(note, seal, index)))
        for _ in range(20):
            await asyncio.sleep(0)  # the receiver begins to wait for block 0, and reads the others' names meanwhile
    trailer = types_pb2.HandoffTrailer(
        block_indexes=[0, 1], checksums=sums, first_token=9, num_computed_tokens=NUM_TOKENS
    )
    await sender.send(receiver.address, ticket, TRAILER_INDEX, memoryview(encode_trailer(trailer, 2, seal, 2)))
    await until(lambda: inbox.num_arrived == 3)
    await sender.send_blocks(receiver.address, ticket, leaving, lambda: None)
    assert await receiving == ReceivedHandoff(9, False)
    assert not inbox.damaged
    assert [bytes(arrived[i]) for i in range(2)] == pool
    await sender.close()
    await receiver.close()


async def test_sizes_that_no_receiver_asked_for_end_the_hand_off() -> None:
    with pytest.raises(TransferFailed) as refused:
        await handed_off(None, takes=False)
    assert refused.value.field == "packed_bytes"


def link_of(bytes_s: float) -> LinkRate:
    link = LinkRate()
    link.began(MEASURED_BYTES, 1.0)
    link.ended(MEASURED_BYTES, 1.0 + MEASURED_BYTES / bytes_s, taken=True)
    return link


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("bfloat16", 0.7, 0.75), ("float16", 0.85, 0.9), ("float32", 0.8, 0.9)]
)
def test_rates_are_those_of_a_whole_block_of_numbers_as_kv_has_them(dtype: str, least: float, most: float) -> None:
    rates = BlockPacking(ReferencePacker(), BLOCK_BYTES, dtype).rates
    assert least < rates.ratio < most
    assert rates.pack_bytes_s > 0
    assert rates.unpack_bytes_s > 0


def test_blocks_are_packed_where_that_is_faster_than_the_link() -> None:
    rates = PackingRates(2e9, 3e9, 0.7)
    assert not LinkRate().packs(rates, 3e9)  # nothing is known
    assert link_of(125e6).packs(rates, 3e9)
    assert not link_of(125e6).packs(rates, 0)
    assert not link_of(125e6).packs(PackingRates(2e9, 3e9, 1.0), 3e9)
    assert not link_of(1e9).packs(rates, 3e9)
    between = 0.3 * 6e9 / 5 * 0.9  # packing takes less than without, but not by a tenth
    link = link_of(between)
    assert not link.packs(rates, 3e9)
    link.bytes_s = 125e6
    assert link.packs(rates, 3e9)
    link.bytes_s = between
    assert link.packs(rates, 3e9)  # as before
    link.bytes_s = 1e9
    assert not link.packs(rates, 3e9)


def test_few_bytes_or_failed_sends_are_no_measurement() -> None:
    link = LinkRate()
    link.began(1 << 20, 1.0)
    link.ended(1 << 20, 1.0001, taken=True)
    link.began(MEASURED_BYTES, 2.0)
    link.ended(MEASURED_BYTES, 9.0, taken=False)
    assert link.bytes_s is None


def test_numbers_that_do_not_shrink_have_rates_too() -> None:
    class Unpacked(ReferencePacker):
        def pack(self, numbers: object, out: object) -> int:
            return 0

    rates = BlockPacking(Unpacked(), BLOCK_BYTES, "bfloat16").rates
    assert rates.ratio == 1.0
    assert rates.pack_bytes_s == rates.unpack_bytes_s > 0
