"""Packed hand-offs over UCX between two processes: by the C++ kernels, shorter messages than their receives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.errors import TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.receive_handoff import ReceivedHandoff
from tests.integration.kv.conftest import BY_NETWORK, FAR_HOST, NEAR_HOST, FarProcess, Sides, ucx_sides
from tests.integration.kv.far_side import BLOCK_BYTES, block_packing, packable
from tests.integration.kv.reservation import NUM_BLOCKS, RIGHT, Reservation, ship
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SECRET = b"a secret of sixteen bytes or more"
ALL = list(range(NUM_BLOCKS))


@pytest.fixture(params=["tcp", "tags", "aes-gcm"])
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    encryption = "aes-gcm" if request.param == "aes-gcm" else "none"
    secret = b"" if request.param == "tcp" else SECRET
    process = FarProcess(FAR_HOST, secret, BY_NETWORK, encryption)
    key = FleetKey(secret, encryption=encryption) if secret else None
    async with ucx_sides(process, key, ends=True, host_id=NEAR_HOST) as found:
        yield found


def reservation(sides: Sides, *, takes_packed: bool = True) -> Reservation:
    made = Reservation(sides.near, sides.key)
    made.receiver.check = ArrivalCheck(BLOCK_BYTES, block_packing() if takes_packed else None)
    return made


def right(it: Reservation) -> list[int]:
    return [index for index in ALL if it.memory[index] == packable(RIGHT, index, BLOCK_BYTES)]


async def test_packed_blocks_arrive_from_one_sender_after_another(sides: Sides) -> None:
    it = reservation(sides)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    sent = await ship(sides, ticket, ALL, packed=True, damaged=[2, 5], finish=True)
    assert isinstance(await receiving, ReceivedHandoff)
    assert it.receiver.damaged == {2, 5}
    assert right(it) == [index for index in ALL if index not in (2, 5)]
    assert sent["blocks_packed"] == NUM_BLOCKS
    assert sent["sent"] + sent["saved"] == NUM_BLOCKS * BLOCK_BYTES
    assert sent["saved"] > NUM_BLOCKS * BLOCK_BYTES // 4

    ticket, needed = it.receiver.open()
    assert sorted(needed) == [2, 5]
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    await ship(sides, ticket, needed, packed=True, finish=True)
    assert isinstance(await receiving, ReceivedHandoff)
    assert not it.receiver.damaged
    assert right(it) == ALL


async def test_packed_blocks_that_nobody_asked_for_are_refused(sides: Sides) -> None:
    it = reservation(sides, takes_packed=False)
    ticket, _ = it.receiver.open()
    receiving = asyncio.create_task(it.receiver.receive(DEADLINE_S))
    sending = asyncio.create_task(ship(sides, ticket, ALL, packed=True, finish=True))
    with pytest.raises(TransferFailed):
        await receiving
    await asyncio.wait((sending,), timeout=DEADLINE_S)
    assert sending.done()
