"""Encrypted hand-offs over UCX between two processes: what crosses, and what is done to it on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.errors import TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.receive_handoff import ReceivedHandoff, receive_trailer
from shared.kv.handoff.shipment import decode_trailer, trailer_bytes
from shared.kv.seal import Purpose
from tests.integration.kv.conftest import FarProcess, Sides, ucx_sides
from tests.integration.kv.far_side import BLOCK_BYTES, FIRST_TOKEN, Memory, content
from tests.integration.kv.reservation import (
    NUM_BLOCKS,
    Reservation,
    assert_a_replay_is_refused,
    assert_a_second_sender_completes,
    ship,
)
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SECRET = b"a secret of sixteen bytes or more"
ALL = list(range(NUM_BLOCKS))
CIPHERS = ("aes-gcm", "chacha20-poly1305")


@pytest.fixture(params=[(name, name) for name in CIPHERS], ids=CIPHERS)
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    """(near's cipher, far's)"""
    ours, theirs = request.param
    process = FarProcess(None, SECRET, encryption=theirs)
    async with ucx_sides(process, FleetKey(SECRET, encryption=ours), ends=True) as found:
        yield found


async def test_an_encrypted_hand_off_arrives_from_one_sender_after_another(sides: Sides) -> None:
    await assert_a_second_sender_completes(sides, Reservation(sides.near, sides.key))


async def test_what_crosses_is_cipher_text_alone(sides: Sides) -> None:
    """The plain receives of the transfer plane get what a listener in the network would."""
    ticket, memory = 7, Memory([(index, BLOCK_BYTES) for index in ALL])
    seal = sides.key.seal(Purpose.HANDOFF, ticket, BLOCK_BYTES)
    incoming = sides.near.expect(ticket, memory.buffers, trailer_bytes(len(ALL), seal))
    shipping = asyncio.create_task(ship(sides, ticket, ALL, content_of=ticket, finish=True))
    note = await incoming.trailer()
    await incoming.blocks(ALL)
    incoming.expect_another_trailer()
    trailer = await incoming.trailer()
    await shipping
    await sides.near.cancel(ticket)
    said = decode_trailer(note, seal, 0)
    crossed = b"".join(memory.blocks.values()) + note + trailer
    for index in ALL:
        plain = content(ticket, index, BLOCK_BYTES)
        assert not any(plain[at : at + 8] in crossed for at in range(0, 800, 8))
    assert not any(checksum.to_bytes(8, "little") in crossed for checksum in said.checksums)
    assert decode_trailer(trailer, seal, 1).first_token == FIRST_TOKEN
    for index, tag in zip(said.block_indexes, said.block_tags, strict=True):
        assert all(seal.open_blocks([(index, memoryview(memory.blocks[index]), tag)]))
    assert memory.holding(ticket) == ALL


async def test_blocks_changed_or_swapped_on_the_way_are_damaged(sides: Sides) -> None:
    it = Reservation(sides.near, sides.key)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(sides, ticket, ALL, damaged=[2], swapped=[4, 6], finish=True)
    assert isinstance(await receiving, ReceivedHandoff)
    assert it.receiver.damaged == {2, 4, 6}
    assert it.right() == [index for index in ALL if index not in (2, 4, 6)]


async def test_what_was_sent_for_another_hand_off_is_refused(sides: Sides) -> None:
    await assert_a_replay_is_refused(sides, Reservation(sides.near, sides.key))


async def test_a_hand_off_is_no_offer(sides: Sides) -> None:
    """Under the right ticket, but for another purpose."""
    ticket, memory = 9, Memory([(0, BLOCK_BYTES)])
    seal = sides.key.seal(Purpose.OFFER, ticket, BLOCK_BYTES)
    incoming = sides.near.expect(ticket, memory.buffers, trailer_bytes(1, seal))
    sending = asyncio.create_task(ship(sides, ticket, [0], finish=True))
    with pytest.raises(TransferFailed, match="not from a worker of this fleet"):
        await receive_trailer(sides.near, ticket, incoming, DEADLINE_S, seal)
    await sending


UNEQUAL = [("none", "aes-gcm"), ("aes-gcm", "none"), ("aes-gcm", "chacha20-poly1305")]


@pytest.mark.parametrize("sides", UNEQUAL, indirect=True, ids=["-".join(pair) for pair in UNEQUAL])
async def test_unequal_settings_are_refused_on_both_sides_and_named(
    sides: Sides, request: pytest.FixtureRequest
) -> None:
    ours, theirs = request.node.callspec.params["sides"]
    with pytest.raises(TransferFailed, match=f"{ours} here and {theirs} at the peer") as refused:
        await sides.near.send(sides.address, 1, 0, memoryview(bytes(100)))
    assert refused.value.details == {"field": "block_encryption", "ours": ours, "theirs": theirs}
    with pytest.raises(TransferFailed, match=f"{theirs} here and {ours} at the peer"):
        await ship(sides, 1, [0])
