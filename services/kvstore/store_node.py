"""A store node: stores blocks that workers offer, and sends them to workers that fetch them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from services.kvstore.requests import check_tenant
from services.kvstore.staging import Staging
from services.kvstore.tiers.accounts import Quotas
from services.kvstore.tiers.arena import HostArena
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.order import PLAIN, Keep
from services.kvstore.tiers.shared_disk import SharedDiskTier
from services.kvstore.tiers.stack import TierStack
from services.kvstore.tiers.tier import BlockTier, TierEvents
from shared.block_service.client import SentBlock
from shared.block_service.store_client import Wanted
from shared.errors import ModelMismatch, StoreUnavailable, TransferFailed
from shared.kv.fleet_key import FleetKey, seal_of
from shared.kv.handoff.arrival_check import announcements
from shared.kv.handoff.receive_handoff import LostMemory, MemoryLost, receive_trailer
from shared.kv.handoff.shipment import Shipment, trailer_bytes
from shared.kv.pool import OutgoingBlock
from shared.kv.seal import Purpose, Seal
from shared.kv.transfer import Incoming, KVTransfer, TransferCounters, new_ticket
from shared.kv_index.holders import Tier
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.tasks import unbroken

logger = logging.getLogger(__name__)
TRANSFER_TIMEOUT_S = 10.0
"""What a worker offered must be here within this time, and what it fetches be taken this long after the last block was
read; else the transfer is abandoned. Seconds."""
LOOK_S = 5.0
"""Between two looks at what neighbours hold in a shared disk folder. Seconds."""
FETCH_BATCH = 8
"""Blocks read in one batch."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Sizes of one node; see KVStoreSettings."""

    host_bytes: int
    disk_folder: Path | None
    disk_bytes: int
    staging_bytes: int
    send_bytes_per_s: float = 0.0
    quotas: Mapping[Tier, Quotas] = field(default_factory=dict)
    pin_share: float = 0.0
    shared_as: str = ""
    """The node's name in a disk folder that others use too; empty: it is this node's alone."""


class StoreNode:
    """Tiers behind one thread, a transfer plane, and one publisher for each tier. `start()`/`close()`; runs on the
    event loop.

    All blocks of a node have one size, set by the first worker that offers or fetches. Bytes pass through staging
    memory of a fixed size: without a free slot, offers are declined and fetches wait.
    """

    def __init__(
        self,
        config: NodeConfig,
        transfer: KVTransfer,
        publisher: Callable[[Tier], IndexPublisher],
        fleet_key: FleetKey | None = None,
    ) -> None:
        """Owns the transfer, and the publishers that `publisher` makes. With a `fleet_key`, blocks must be sealed for
        their ticket, and are where they are sent. Raises ConfigError for a disk tier without
        room for one block."""
        self._config = config
        self._transfer = transfer
        self._fleet_key = fleet_key
        self._disk: DiskTier | None = None
        if config.disk_bytes:
            assert config.disk_folder is not None
            bounds = (config.disk_bytes, 1, config.quotas.get(Tier.DISK), config.pin_share)
            if config.shared_as:
                self._disk = SharedDiskTier(config.disk_folder, config.shared_as, *bounds)
            else:
                self._disk = DiskTier(config.disk_folder, *bounds)
        self._tiers = TierStack([], None) if self._disk is None else TierStack([self._disk], self._disk.folder)
        self._looking: asyncio.Task[None] | None = None
        kinds = [Tier.HOST] * bool(config.host_bytes) + [Tier.DISK] * bool(config.disk_bytes)
        self._publishers = {tier: publisher(tier) for tier in kinds}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store tiers")
        self._limiter = _RateLimiter(config.send_bytes_per_s)
        self._block_bytes = 0  # 0: not known yet
        self._opening = asyncio.Lock()
        self._staging: Staging
        self._coming: set[bytes] = set()
        self._lost = LostMemory()
        self._receiving: set[asyncio.Task[None]] = set()
        self._is_started = False

    @property
    def tiers(self) -> Sequence[BlockTier]:
        """Fastest first; the host tier exists once the size of a block is known."""
        return self._tiers.tiers

    @property
    def transfer_counters(self) -> TransferCounters:
        """Bytes received and sent over the transfer plane."""
        return self._transfer.counters

    def failure(self, tier: Tier) -> str:
        """Why the last call on a tier failed; empty if it did not."""
        error = self._tiers.failed.get(tier)
        return error.message if error is not None else ""

    async def start(self) -> None:
        """Raises ConfigError for a disk folder that cannot be used, TransferFailed without a transfer plane. Calls
        before its end raise StoreUnavailable."""
        if self._disk is not None:
            await self._in_thread(self._tiers.load_pins)
            await self._in_thread(self._disk.start)
        await self._transfer.start()
        self._is_started = True
        for publisher in self._publishers.values():
            await publisher.start()
        if isinstance(self._disk, SharedDiskTier):
            self._looking = asyncio.create_task(self._look(self._disk))

    async def close(self) -> None:
        """Ends running transfers; idempotent."""
        if self._looking is not None:
            self._looking.cancel()
        for task in list(self._receiving):
            task.cancel()
        if self._receiving:
            await asyncio.wait(self._receiving, timeout=TRANSFER_TIMEOUT_S)
        for publisher in self._publishers.values():
            await publisher.close()
        await self._transfer.close()
        self._thread.shutdown()
        self._tiers.close()

    async def offer(
        self, worker_name: str, hashes: Sequence[bytes], block_bytes: int, tenant: str = "", keep: Keep = PLAIN
    ) -> Wanted:
        """Returns which of these blocks to send here; receives are posted for them. Raises ModelMismatch for blocks of
        another size, ConfigError if not even one fits the node's budgets."""
        await self.open(block_bytes)
        fresh = [(index, name) for index, name in enumerate(hashes) if name not in self._coming]
        most = self._staging.num_free
        wanted = await self._in_thread(lambda: self._admit(fresh, most, block_bytes, tenant, keep))
        # Other offers may have taken slots meanwhile.
        wanted = [item for item in wanted if hashes[item[0]] not in self._coming]
        slots = self._staging.take(len(wanted))
        wanted = wanted[: len(slots)]
        if not wanted:
            return Wanted((), 0, b"")
        blocks = [(hashes[index], slot, tiers) for (index, tiers), slot in zip(wanted, slots, strict=True)]
        ticket = new_ticket()
        buffers = [(place, self._staging.memory(slot)) for place, slot in enumerate(slots)]
        seal = seal_of(self._fleet_key, Purpose.OFFER, ticket, block_bytes)
        incoming = self._transfer.expect(ticket, buffers, trailer_bytes(len(blocks), seal))
        self._coming.update(name for name, _, _ in blocks)
        task = asyncio.create_task(self._receive(worker_name, (tenant, keep), ticket, incoming, blocks, seal))
        self._receiving.add(task)
        task.add_done_callback(self._receiving.discard)
        return Wanted(tuple(index for index, _ in wanted), ticket, self._transfer.address)

    async def with_tiers(self, work: Callable[[TierStack], T]) -> T:
        """Runs `work` in the tiers' thread and returns its result. Raises StoreUnavailable before `start`."""
        self._check_started()
        return await self._in_thread(lambda: work(self._tiers))

    async def look_up(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are stored here."""
        return await self.with_tiers(lambda tiers: [tiers.holds(name) for name in hashes])

    async def flush(self, tenant: str | None) -> tuple[int, int]:
        """See `BlockProvider`."""
        if tenant is not None:
            check_tenant(tenant)
        return await self.with_tiers(lambda tiers: tiers.flush(tenant))

    async def _look(self, disk: SharedDiskTier) -> None:
        """Follows what neighbours store and evict."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.with_tiers(lambda tiers: tiers.look(disk))

    async def _memory(self, slots: Sequence[int]) -> list[memoryview]:
        """The bytes of some slots of the staging memory."""
        return [self._staging.memory(slot) for slot in slots]

    async def fetch(
        self, hashes: Sequence[bytes], block_bytes: int, ticket: int, address: bytes
    ) -> AsyncGenerator[list[SentBlock], None]:
        """Sends blocks, the last one first, then a trailer; yields each batch once its sends have begun. Raises
        TransferFailed."""
        await self.open(block_bytes)
        shipment = Shipment(
            self._transfer, address, ticket, len(hashes), self._memory,
            lambda blocks: self._give_back([block.block_id for block in blocks]),
            TRANSFER_TIMEOUT_S, seal_of(self._fleet_key, Purpose.FETCH, ticket, block_bytes),
        )  # fmt: skip
        async with shipment:
            left = list(range(len(hashes)))
            while left:
                slots = await self._staging.wait(min(FETCH_BATCH, len(left)))
                batch, left = left[-len(slots) :][::-1], left[: -len(slots)]
                sent = await self._send_batch(shipment, [(index, hashes[index]) for index in batch], slots)
                if sent:
                    yield sent
                await self._limiter.spend(len(sent) * block_bytes)
            await shipment.finish(0, 0, finished=False)

    async def _send_batch(
        self, shipment: Shipment, batch: list[tuple[int, bytes]], slots: list[int]
    ) -> list[SentBlock]:
        """Reads these blocks into the slots and begins to send those that are undamaged."""
        memory = [self._staging.memory(slot) for slot in slots]
        read = self._in_thread(
            lambda: [self._tiers.read(name, into) for (_, name), into in zip(batch, memory, strict=True)]
        )
        try:
            found = await unbroken(read)
        except BaseException:
            self._give_back(slots)
            raise
        leaving = []
        for (index, _), slot, block in zip(batch, slots, found, strict=True):
            if block is None:
                self._staging.give_back(slot)
            else:
                leaving.append((OutgoingBlock("", index, slot, block.checksum), block.tier))
        tags = await shipment.add(*(block for block, _ in leaving))
        return [
            SentBlock(block.index, block.checksum, tier, tag) for (block, tier), tag in zip(leaving, tags, strict=True)
        ]

    async def _receive(
        self,
        worker_name: str,
        whose: tuple[str, Keep],
        ticket: int,
        incoming: Incoming,
        blocks: list[tuple[bytes, int, tuple[BlockTier, ...]]],
        seal: Seal | None,
    ) -> None:
        """Waits for the blocks of one offer, stores them and frees their slots."""
        lost = False
        try:
            trailer = await receive_trailer(self._transfer, ticket, incoming, TRANSFER_TIMEOUT_S, seal)
            num_bad = await unbroken(self._in_thread(lambda: self._put(blocks, trailer, whose, seal)))
            if num_bad:
                logger.error("%d blocks of %s arrived damaged and were dropped", num_bad, worker_name)
        except MemoryLost as error:
            lost = True
            logger.critical("staging memory for %d blocks is lost until their sender ends: %s", len(blocks), error)
            self._lost.keep(incoming.closed(), lambda: self._give_back([slot for _, slot, _ in blocks]))
        except TransferFailed as error:
            logger.warning("%d blocks of %s did not arrive: %s", len(blocks), worker_name, error)
        finally:
            for name, slot, _ in blocks:
                self._coming.discard(name)
                if not lost:
                    self._staging.give_back(slot)

    def _give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._staging.give_back(slot)

    def _admit(
        self, offered: list[tuple[int, bytes]], most: int, block_bytes: int, tenant: str, keep: Keep
    ) -> list[tuple[int, tuple[BlockTier, ...]]]:
        """At most `most` pairs (index of a block, tiers that want it). Runs in the tiers' thread."""
        wanted: list[tuple[int, tuple[BlockTier, ...]]] = []
        for index, name in offered:
            if len(wanted) == most:
                break
            tiers = self._tiers.wanting(name, block_bytes, tenant, keep)
            if tiers:
                wanted.append((index, tiers))
        return wanted

    def _put(
        self,
        blocks: list[tuple[bytes, int, tuple[BlockTier, ...]]],
        trailer: types_pb2.HandoffTrailer,
        whose: tuple[str, Keep],
        seal: Seal | None,
    ) -> int:
        """Stores blocks, in the tiers' thread; returns how many blocks are not what they were where they were made."""
        num_bad = 0
        for place, announced in announcements(trailer):
            name, slot, tiers = blocks[place]
            memory = self._staging.memory(slot)
            try:
                if seal is not None and not seal.open_blocks([(place, memory, announced.tag)])[0]:
                    raise ValueError("not sealed for this offer")
                self._tiers.put(name, memory, announced.checksum, tiers, *whose)
            except ValueError:
                num_bad += 1
                tiers[0].counters.num_bad += 1
        return num_bad

    async def open(self, block_bytes: int) -> None:
        """Allocates host tier and staging for blocks of this size, once. Raises like `offer`."""
        self._check_started()
        async with self._opening:
            if self._block_bytes not in (0, block_bytes):
                raise ModelMismatch(
                    f"the store's blocks have {self._block_bytes} bytes, these {block_bytes}",
                    field="block_bytes",
                    limit=self._block_bytes,
                )
            if self._block_bytes == 0:
                if block_bytes == 0 or block_bytes % 8:
                    raise ModelMismatch("block_bytes must be a multiple of 8 above 0", field="block_bytes")
                await unbroken(self._allocate(block_bytes))  # a caller that leaves must leave no second host tier

    async def _allocate(self, block_bytes: int) -> None:
        staging = Staging(self._config.staging_bytes, block_bytes)
        if self._disk is not None:
            self._disk.check_block(block_bytes)
        if self._config.host_bytes:
            quotas = self._config.quotas.get(Tier.HOST)
            arena = HostArena(self._config.host_bytes, block_bytes, quotas, self._config.pin_share)
            await self._in_thread(arena.start)
            await self.with_tiers(lambda tiers: tiers.add_fastest(arena))
        self._staging = staging
        self._block_bytes = block_bytes

    def _check_started(self) -> None:
        # The process serves before: its disk may take long, and the index waits for nothing.
        if not self._is_started:
            raise StoreUnavailable("the store is starting")

    def _publish(self, events: Sequence[tuple[Tier, TierEvents]]) -> None:
        """Reports stored and evicted blocks to the index."""
        for tier, event in events:
            self._publishers[tier].offer(event.sealed, event.evicted)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` in the tiers' thread. The tiers' events are published afterwards, even where the caller was
        cancelled."""
        loop = asyncio.get_running_loop()

        def run() -> T:
            try:
                return work()
            finally:
                loop.call_soon_threadsafe(
                    self._publish, [(tier.tier, tier.drain_events()) for tier in self._tiers.tiers]
                )

        try:
            return await loop.run_in_executor(self._thread, run)
        except RuntimeError as error:  # the executor was shut down
            raise StoreUnavailable("the store is closing") from error


class _RateLimiter:
    """Lets `bytes_per_s` pass on average; 0 = no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def spend(self, num_bytes: int) -> None:
        """Counts `num_bytes`; returns when they and all earlier bytes fit the rate."""
        if self._bytes_per_s and num_bytes:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            await asyncio.sleep(self._free_at - now)
