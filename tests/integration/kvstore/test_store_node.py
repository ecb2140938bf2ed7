"""One store node against a worker that is a test: what it takes, keeps, refuses and gives. Real tiers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from services.kvstore.store_node import NodeConfig, StoreNode
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.pins import Pin
from services.kvstore.tiers.stack import TierStack
from shared.errors import ConfigError, ModelMismatch, StoreUnavailable
from shared.identity import WorkerIdentity, WorkerRole
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.shipment import decode_trailer, encode_trailer, trailer_bytes
from shared.kv.seal import Purpose
from shared.kv.transfer import TRAILER_INDEX, new_ticket
from shared.kv_index.holders import Tier
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.integration.kvstore.workers import hashes
from tests.local_transfer import LocalPlane, LocalTransfer
from tests.waiting import DEADLINE_S, until

BLOCK_BYTES = 4096
CHAIN = hashes(12)
BLOCKS = [memoryview(bytearray(random.Random(i).randbytes(BLOCK_BYTES))) for i in range(12)]


class Index:
    """Takes everything."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {Tier.HOST: set(), Tier.DISK: set()}

    async def publish(self, worker, names, tier=Tier.HOST, stamp=None) -> bool:
        assert worker.role is WorkerRole.STORE
        self.held[tier] |= set(names)
        return True

    async def remove(self, worker, names, tier=Tier.HOST, stamp=None) -> bool:
        self.held[tier] -= set(names)
        return True


class Rig:
    """A node, and a worker's transfer."""

    def __init__(self, fleet_key: FleetKey | None = None, **config) -> None:
        sizes = {"host_bytes": 0, "disk_folder": None, "disk_bytes": 0, "staging_bytes": 8 * BLOCK_BYTES, **config}
        plane = LocalPlane()
        self.index = Index()
        self.near = LocalTransfer(plane)
        identity = WorkerIdentity("store-0", 1, WorkerRole.STORE)
        self.node = StoreNode(
            NodeConfig(**sizes),
            LocalTransfer(plane),
            lambda tier: IndexPublisher(self.index, identity, tier=tier, flush_interval_s=0.001),
            fleet_key,
        )

    async def give(self, names, blocks, sums=None) -> list[int]:
        """Offers blocks and sends what is wanted; returns when the node has dealt with it."""
        wanted = await self.node.offer("w", names, BLOCK_BYTES)
        trailer = types_pb2.HandoffTrailer()
        for place, index in enumerate(wanted.indexes):
            await self.near.send(wanted.transfer_address, wanted.ticket, place, blocks[index])
            trailer.block_indexes.append(place)
            trailer.checksums.append(sums[index] if sums else block_checksum(blocks[index]))
        if wanted.indexes:
            data = memoryview(bytearray(encode_trailer(trailer, len(wanted.indexes))))
            await self.near.send(wanted.transfer_address, wanted.ticket, TRAILER_INDEX, data)
            await asyncio.wait(list(self.node._receiving), timeout=DEADLINE_S)
        return list(wanted.indexes)

    async def fetch(self, names) -> dict[int, tuple[bytes, Tier]]:
        """What comes of these blocks, checked, and from which tier."""
        ticket = new_ticket()
        memory = [memoryview(bytearray(BLOCK_BYTES)) for _ in names]
        incoming = self.near.expect(ticket, list(enumerate(memory)), trailer_bytes(len(names)))
        came = {}
        async for sent in self.node.fetch(names, BLOCK_BYTES, ticket, self.near.address):
            await incoming.blocks([block.index for block in sent])
            for block in sent:
                assert block_checksum(memory[block.index]) == block.checksum
                came[block.index] = (bytes(memory[block.index]), block.tier)
        await incoming.trailer()
        await self.near.cancel(ticket)
        return came


@contextlib.asynccontextmanager
async def rig(**config) -> AsyncIterator[Rig]:
    rig = Rig(**config)
    await rig.near.start()
    await rig.node.start()
    try:
        yield rig
    finally:
        await rig.node.close()
        await rig.near.close()


async def test_what_was_given_is_published_and_given_back_last_block_first():
    async with rig(host_bytes=1 << 20) as r:
        assert await r.give(CHAIN, BLOCKS) == list(range(8))  # as many as staging holds
        assert await r.give(CHAIN, BLOCKS) == list(range(8, 12))
        assert await r.give(CHAIN, BLOCKS) == []
        await until(lambda: r.index.held[Tier.HOST] == set(CHAIN))
        assert await r.node.look_up(CHAIN) == [True] * 12
        came = await r.fetch(CHAIN)
        assert list(came) == list(range(11, -1, -1))
        assert all(came[i] == (bytes(BLOCKS[i]), Tier.HOST) for i in range(12))
        assert r.node._staging.num_free == 8


async def test_a_bit_flipped_in_the_arena_on_disk_or_in_flight_is_never_given(tmp_path: Path):
    async with rig(host_bytes=1 << 20) as r:
        await r.give(CHAIN[:4], BLOCKS)
        r.node.tiers[0]._slots[r.node.tiers[0]._places[CHAIN[2]][0]][77] ^= 4
        assert sorted(await r.fetch(CHAIN[:4])) == [0, 1, 3]
        assert (await r.node.look_up(CHAIN[:4]), r.node.tiers[0].counters.num_bad) == ([True, True, False, True], 1)
        sums = [block_checksum(block) for block in BLOCKS]
        sums[6] ^= 1
        await r.give(CHAIN[4:8], BLOCKS[4:8], sums[4:8])
        assert await r.node.look_up(CHAIN[4:8]) == [True, True, False, True]
        await until(lambda: r.index.held[Tier.HOST] == {*CHAIN[:8]} - {CHAIN[2], CHAIN[6]})
    async with rig(disk_folder=tmp_path, disk_bytes=1 << 20) as r:
        await r.give(CHAIN[:4], BLOCKS)
        path = r.node.tiers[0]._path(CHAIN[1])
        content = bytearray(path.read_bytes())
        content[500] ^= 1
        path.write_bytes(content)
        assert sorted(await r.fetch(CHAIN[:4])) == [0, 2, 3]


async def test_a_restarted_node_has_what_lay_on_disk_and_brings_it_into_memory(tmp_path: Path):
    sizes = {"host_bytes": 1 << 20, "disk_folder": tmp_path, "disk_bytes": 1 << 20}
    async with rig(**sizes) as r:
        await r.give(CHAIN[:5], BLOCKS)
    async with rig(**sizes) as r:
        await until(lambda: r.index.held[Tier.DISK] == set(CHAIN[:5]))
        assert await r.node.look_up(CHAIN) == [True] * 5 + [False] * 7
        assert {tier for _, tier in (await r.fetch(CHAIN[:5])).values()} == {Tier.DISK}
        assert {tier for _, tier in (await r.fetch(CHAIN[:5])).values()} == {Tier.HOST}


async def test_a_full_disk_costs_the_disk_tier_alone(tmp_path: Path, monkeypatch):
    async with rig(host_bytes=1 << 20, disk_folder=tmp_path, disk_bytes=1 << 20) as r:
        await r.give(CHAIN[:1], BLOCKS)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(r.node.tiers[1], "_write", full)
        await r.give(CHAIN[:4], BLOCKS)
        assert "No space left" in r.node.failure(Tier.DISK)
        assert {tier for _, tier in (await r.fetch(CHAIN[:4])).values()} == {Tier.HOST}
        monkeypatch.undo()
        await r.give(CHAIN[4:5], BLOCKS[4:])
        assert r.node.failure(Tier.DISK) == ""


async def test_a_worker_that_falls_silent_costs_no_staging_for_long(monkeypatch):
    monkeypatch.setattr("services.kvstore.store_node.TRANSFER_TIMEOUT_S", 0.05)
    async with rig(host_bytes=1 << 20) as r:
        wanted = await r.node.offer("w", CHAIN[:8], BLOCK_BYTES)
        assert len(wanted.indexes) == 8
        assert await r.give(CHAIN, BLOCKS) == []
        await until(lambda: r.node._staging.num_free == 8)
        assert await r.give(CHAIN[:8], BLOCKS) == list(range(8))


async def test_what_comes_before_a_node_is_started_is_refused_and_costs_nothing(tmp_path: Path):
    sizes = {"host_bytes": 1 << 20, "disk_folder": tmp_path, "disk_bytes": 1 << 20, "pin_share": 0.5}
    pins = [Pin(name, "", (block_hash,), BLOCK_BYTES) for name, block_hash in zip("ab", CHAIN, strict=False)]
    async with rig(**sizes) as r:
        await r.node.with_tiers(lambda tiers: tiers.pin(pins[0]))
    late = Rig(**sizes)
    with pytest.raises(StoreUnavailable, match="starting"):
        await late.node.offer("w", CHAIN, BLOCK_BYTES)
    with pytest.raises(StoreUnavailable, match="starting"):
        await late.node.with_tiers(lambda tiers: tiers.pin(pins[1]))
    with pytest.raises(StoreUnavailable, match="starting"):
        await late.node.look_up(())
    await late.near.start()
    await late.node.start()
    assert await late.give(CHAIN, BLOCKS) == list(range(8))
    assert [state.pin for state in await late.node.with_tiers(lambda tiers: tiers.pins())] == pins[:1]
    await late.node.close()
    await late.near.close()


async def test_a_worker_that_leaves_its_first_offer_leaves_one_host_tier(monkeypatch):
    adding, go_on = threading.Event(), threading.Event()
    add_fastest = TierStack.add_fastest

    def slow(stack: TierStack, tier) -> None:
        adding.set()
        go_on.wait(DEADLINE_S)
        add_fastest(stack, tier)

    monkeypatch.setattr(TierStack, "add_fastest", slow)
    async with rig(host_bytes=1 << 20) as r:
        offer = asyncio.create_task(r.node.offer("w", CHAIN, BLOCK_BYTES))
        await asyncio.to_thread(adding.wait, DEADLINE_S)
        offer.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)
        await asyncio.wait([offer])
        await r.give(CHAIN, BLOCKS)
        assert len(r.node.tiers) == 1


async def test_sizes_that_cannot_be_are_refused_by_name():
    async with rig(host_bytes=BLOCK_BYTES - 8) as r:
        with pytest.raises(ConfigError, match="host_bytes"):
            await r.node.offer("w", CHAIN, BLOCK_BYTES)
    async with rig(host_bytes=1 << 20) as r:
        await r.give(CHAIN[:1], BLOCKS)
        with pytest.raises(ModelMismatch, match="4096 bytes, these 2048"):
            await r.node.offer("w", CHAIN, 2048)


@pytest.mark.parametrize("encryption", ["none", "aes-gcm"])
async def test_in_a_fleet_with_a_key_blocks_are_kept_and_given_sealed_for_their_place_alone(encryption):
    key = FleetKey(b"the fleet's secret of some bytes", encryption=encryption)
    async with rig(host_bytes=1 << 20, fleet_key=key) as r:

        async def give(first: int, swapped: Sequence[int] = ()) -> None:
            wanted = await r.node.offer("w", CHAIN[first : first + 4], BLOCK_BYTES)
            seal = key.seal(Purpose.OFFER, wanted.ticket, BLOCK_BYTES)
            closed = seal.close_blocks(list(enumerate(BLOCKS[first : first + 4])))
            order = [swapped[1 - swapped.index(place)] if place in swapped else place for place in range(4)]
            for place in range(4):
                await r.near.send(wanted.transfer_address, wanted.ticket, place, closed[order[place]].wire)
            trailer = types_pb2.HandoffTrailer(
                block_indexes=range(4),
                checksums=[block_checksum(BLOCKS[first + place]) for place in order],
                block_tags=[closed[place].tag for place in order],
            )
            data = memoryview(bytearray(encode_trailer(trailer, 4, seal)))
            await r.near.send(wanted.transfer_address, wanted.ticket, TRAILER_INDEX, data)
            await asyncio.wait(list(r.node._receiving), timeout=DEADLINE_S)

        await give(0)
        await give(4, swapped=(1, 2))  # each with its right checksum and a tag of this offer
        held = [0, 1, 2, 3, 4, 7]
        assert [index for index, here in enumerate(await r.node.look_up(CHAIN)) if here] == held
        assert r.node.tiers[0].counters.num_bad == 2
        await r.give(CHAIN[8:], BLOCKS[8:])  # by a stranger: no seal at all
        assert not any(await r.node.look_up(CHAIN[8:]))

        ticket = new_ticket()
        seal = key.seal(Purpose.FETCH, ticket, BLOCK_BYTES)
        memory = [memoryview(bytearray(BLOCK_BYTES)) for _ in CHAIN]
        incoming = r.near.expect(ticket, list(enumerate(memory)), trailer_bytes(len(CHAIN), seal))
        async for sent in r.node.fetch(CHAIN, BLOCK_BYTES, ticket, r.near.address):
            await incoming.blocks([block.index for block in sent])
            for block in sent:
                assert (memory[block.index] == BLOCKS[block.index]) == (encryption == "none")
                copy = memoryview(bytearray(memory[block.index]))
                assert seal.open_blocks([(block.index + 1, copy, block.tag)]) == [False]
                assert seal.open_blocks([(block.index, memory[block.index], block.tag)]) == [True]
        assert decode_trailer(await incoming.trailer(), seal).block_indexes
        await r.near.cancel(ticket)
        assert [index for index, block in enumerate(memory) if block == BLOCKS[index]] == held


async def test_a_node_gives_what_a_neighbour_on_the_same_file_system_stored(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("services.kvstore.store_node.LOOK_S", 0.01)
    shared = {"disk_folder": tmp_path, "disk_bytes": 1 << 20}
    async with rig(**shared, shared_as="store-1") as other:
        async with rig(**shared, shared_as="store-0", host_bytes=1 << 20) as one:
            await one.give(CHAIN[:4], BLOCKS)
            await until(lambda: other.index.held[Tier.DISK] == set(CHAIN[:4]))
            assert await other.give(CHAIN[:5], BLOCKS) == [4], "what a neighbour has is not stored twice"
            await until(lambda: one.index.held[Tier.DISK] == set(CHAIN[:5]))
        came = await other.fetch(CHAIN[:5])  # the neighbour has ended
        assert came == {i: (bytes(BLOCKS[i]), Tier.DISK) for i in range(5)}
        async with rig(**shared, shared_as="store-0") as again:
            await until(lambda: again.index.held[Tier.DISK] == set(CHAIN[:5]))
            assert await again.fetch(CHAIN[:5]) == came
