"""A transfer plane with a key: what is forged is refused, before UCX sees it or before it counts as a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shared.errors import TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.receive_handoff import ReceivedHandoff
from shared.kv.ucx.peer_address import PeerAddress
from tests.integration.kv.conftest import FarProcess, Sides, ucx_sides
from tests.integration.kv.far_side import TRAILER_BYTES, Memory
from tests.integration.kv.reservation import (
    NUM_BLOCKS,
    Reservation,
    assert_a_replay_is_refused,
    assert_a_second_sender_completes,
    ship,
)
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SECRET = b"a secret of sixteen bytes or more"
KEY = FleetKey(SECRET)
ALL = list(range(NUM_BLOCKS))


@pytest.fixture(params=[SECRET], ids=["fleet"])
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    """Near has the fleet's key; far the one of the parameter."""
    async with ucx_sides(FarProcess(None, request.param), KEY, ends=True) as found:
        yield found


async def test_a_hand_off_between_holders_of_the_key_is_taken(sides: Sides) -> None:
    await assert_a_second_sender_completes(sides, Reservation(sides.near, KEY))


async def test_a_forged_address_is_refused_before_ucx_sees_it(sides: Sides) -> None:
    """UCX ends the process on bytes that are no address of it: here they never get that far."""
    real = PeerAddress.decode(sides.address, KEY)
    nonsense = replace(real, worker=b"\xff" * 100)
    other = FleetKey(b"of another fleet, as long")
    flipped = bytearray(sides.address)
    flipped[40] ^= 1
    forged = [real.encode(), nonsense.encode(), nonsense.encode(other), real.encode(other), bytes(flipped), b"", b"x"]
    for address in forged:
        with pytest.raises(TransferFailed) as refused:
            await sides.near.send(address, 1, 0, memoryview(bytes(100)))
        assert refused.value.details["field"] == "transfer_address"
    memory = Memory([(0, 100)])
    incoming = sides.near.expect(7, memory.buffers, TRAILER_BYTES)
    await sides.far("send", address=sides.near.address.hex(), ticket=7, sizes=[(0, 100)], trailer=True)
    await incoming.trailer()
    await sides.near.cancel(7)


async def test_a_flipped_byte_with_its_checksum_made_right_is_found(sides: Sides) -> None:
    it = Reservation(sides.near, KEY)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(sides, ticket, ALL, damaged=[2, 5], resummed=True, finish=True)
    assert isinstance(await receiving, ReceivedHandoff)
    assert it.receiver.damaged == {2, 5}
    assert set(it.receiver.checksums) == set(ALL) - {2, 5}


@pytest.mark.slow
async def test_without_a_key_such_a_byte_is_not_found(sides: Sides) -> None:
    """The checksum alone guards against damage, not against an attacker: this is what the tag adds."""
    it = Reservation(sides.near)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    sending = asyncio.create_task(ship(sides, ticket, [2], damaged=[2], resummed=True))
    await until(lambda: set(it.receiver.checksums) == {2})
    it.receiver.replace_sender()
    await asyncio.gather(receiving, sending)


async def test_a_replayed_header_of_another_hand_off_is_refused(sides: Sides) -> None:
    """The same notes, blocks and trailer, once sealed for another ticket."""
    await assert_a_replay_is_refused(sides, Reservation(sides.near, KEY))


@pytest.mark.parametrize("sides", [b"the secret of another fleet"], indirect=True, ids=["stranger"])
async def test_a_sender_with_another_key_is_refused_on_both_sides(sides: Sides) -> None:
    with pytest.raises(TransferFailed, match="not signed by this fleet"):
        await sides.near.send(sides.address, 1, 0, memoryview(bytes(100)))
    with pytest.raises(TransferFailed, match="not signed by this fleet"):
        await ship(sides, 1, [0])
