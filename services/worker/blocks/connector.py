"""Connects a worker's pool with store nodes and peers: offloads blocks, serves them, fetches prefixes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial

import grpc

from services.worker.blocks.exchange_client import BlockExchangeClient, ExchangeEvent, LocalBlocks
from services.worker.blocks.peer_connections import Peers
from services.worker.blocks.prefix_fetch.fetch import PrefixFetch
from services.worker.blocks.prefix_fetch.fetch_policy import FetchPolicy
from services.worker.host import EngineHost
from shared.block_service.client import SentBlock
from shared.block_service.store_nodes import StoreNodes
from shared.engine.messages import (
    BlocksAdopted,
    BlocksHeld,
    CacheFlushed,
    FetchPrepared,
    PoolChanged,
    ReleaseHeld,
    SequenceEnded,
)
from shared.errors import ConfigError, InvalidRequest, ModelMismatch, TandemError
from shared.kv.block_memory import leaving
from shared.kv.fleet_key import token_of
from shared.kv.handoff.shipment import Shipment
from shared.kv.pool import OutgoingBlock
from shared.kv.rendezvous import by_keeper
from shared.kv.seal import Purpose
from shared.kv_index.holders import Tier

MAX_HELD = 64
"""Most blocks held for senders at once, over all requests; see MAX_HELD_SHARE."""
MAX_HELD_SHARE = 0.25
"""Largest share of the pool that is held for senders at once."""
PART = 8
"""Blocks announced in one message, so that the receiver takes in the first while the others travel."""
BATCH = 64
"""Blocks offered to a store node, and so held for the sender, at once."""
MAX_WAITING = 256
"""Sequences whose blocks wait to be offered; more, and the oldest are dropped."""
SEND_TIMEOUT_S = 10.0
"""A receiver that has not taken everything this long after the last block began to leave is given up. Seconds."""


class BlockServer:
    """Implements `BlockProvider`. A block that is being sent has a reference of its own and cannot be evicted; their
    number is bounded, and later requests wait."""

    def __init__(self, host: EngineHost, exchange: BlockExchangeClient, local: LocalBlocks) -> None:
        """Owns none of them. The host must be started."""
        self._host = host
        self._exchange = exchange
        self._local = local
        self._num_free = max(1, min(MAX_HELD, int(MAX_HELD_SHARE * host.model.num_blocks)))
        self._given_back = asyncio.Event()
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_given = 0
        """Blocks sent to other workers."""

    async def look_up(self, hashes: Sequence[bytes]) -> list[bool]:
        """See `BlockProvider`."""
        return [name in self._local for name in hashes]

    async def fetch(
        self, hashes: Sequence[bytes], block_bytes: int, ticket: int, address: bytes
    ) -> AsyncGenerator[list[SentBlock], None]:
        """See `BlockProvider`."""
        ours = self._host.model.layout.block_bytes
        if block_bytes != ours:
            raise ModelMismatch(
                f"this worker's blocks have {ours} bytes, those asked for {block_bytes}",
                field="block_bytes",
                limit=ours,
            )
        shipment = Shipment(
            self._host.transfer, address, ticket, len(hashes), partial(leaving, self._host.engine.blocks),
            self._release, SEND_TIMEOUT_S, self._host.seal(Purpose.FETCH, ticket),
        )  # fmt: skip
        with self._active():
            async with shipment:
                left = list(range(len(hashes)))
                while left:
                    count = await self._take(len(left))
                    batch, left = left[-count:][::-1], left[:-count]
                    blocks = await self._hold(batch, hashes)
                    self.num_given += len(blocks)
                    parts = [blocks[begin : begin + PART] for begin in range(0, len(blocks), PART)]
                    begun = [(part, shipment.add(*part)) for part in parts]
                    for part, tags in begun:
                        yield [
                            SentBlock(block.index, block.checksum, Tier.DEVICE, tag)
                            for block, tag in zip(part, await tags, strict=True)
                        ]
                await shipment.finish(0, 0, finished=False)

    async def flush(self, tenant: str | None) -> tuple[int, int]:
        """See `BlockProvider`; raises InvalidRequest for one tenant's."""
        if tenant is not None:
            raise InvalidRequest("a worker's pool does not know whose its blocks are", field="tenant")
        num_blocks = await self._exchange.flush()
        return num_blocks, num_blocks * self._host.model.layout.block_bytes

    def expect_session(self, session: str, next_turn_s: float) -> None:
        """Expects a session's next turn in `next_turn_s` seconds; see `BlockPool.expect`."""
        self._exchange.expect_session(session, next_turn_s)

    async def close_session(self, session: str) -> int:
        """Retains nothing in the pool for its sake any more; returns the number of blocks that this frees."""
        return await self._exchange.close_session(session)

    async def close(self, deadline_s: float = 1.0) -> None:
        """Waits for what is being sent, for at most `deadline_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """While something is being sent."""
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()

    async def _hold(self, batch: list[int], hashes: Sequence[bytes]) -> list[OutgoingBlock]:
        """The blocks that are still here, each with a reference for the shipment, which also ends what was taken for
        it."""
        asking = asyncio.create_task(self._exchange.hold(tuple(hashes[index] for index in batch)))
        try:
            held = await asyncio.shield(asking)
        except asyncio.CancelledError:
            held = await asking
            self._host.engine.submit(ReleaseHeld(tuple(block.block_id for block in held.blocks)))
            self._give_back(len(batch))
            raise
        self._give_back(len(batch) - len(held.blocks))
        return [OutgoingBlock("", batch[block.index], block.block_id, block.checksum) for block in held.blocks]

    async def _take(self, most: int) -> int:
        """Reserves room to hold blocks: at least one, at most `most`. Waits while there is none."""
        while not self._num_free:
            self._given_back.clear()
            await self._given_back.wait()
        count = min(most, self._num_free)
        self._num_free -= count
        return count

    def _give_back(self, count: int) -> None:
        self._num_free += count
        self._given_back.set()

    def _release(self, blocks: Sequence[OutgoingBlock]) -> None:
        self._host.engine.submit(ReleaseHeld(tuple(block.block_id for block in blocks)))
        self._give_back(len(blocks))


class StoreOffloader:
    """Offers blocks to one node, batch by batch, one batch on its way at a time. If the node does
    not answer, that is logged and the waiting blocks are dropped."""

    def __init__(self, host: EngineHost, name: str, nodes: StoreNodes, exchange: BlockExchangeClient) -> None:
        """`name` is the node's; owns nothing."""
        self._host = host
        self._name = name
        self._nodes = nodes
        self._exchange = exchange
        self._waiting: deque[tuple[tuple[bytes, ...], SequenceEnded]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.num_sent = 0
        """Blocks that the node took."""
        self.num_dropped = 0
        """Sequences whose blocks were not offered."""

    def start(self) -> None:
        """Begins to offer."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="block offers")

    def add(self, hashes: tuple[bytes, ...], ended: SequenceEnded) -> None:
        """Sealed blocks that a sequence left; returns at once."""
        if self._closing:
            return
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self.num_dropped += 1
        self._waiting.append((hashes, ended))
        self._wake.set()

    async def close(self, deadline_s: float = 1.0) -> None:
        """Takes no more, offers what waits for at most `deadline_s` seconds; twice is fine."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            task, self._task = self._task, None
            await asyncio.wait({task}, timeout=deadline_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            while self._waiting:
                hashes, ended = self._waiting.popleft()
                try:
                    for start in range(0, len(hashes), BATCH):
                        await self._offer(hashes[start : start + BATCH], ended)
                except (ModelMismatch, ConfigError, InvalidRequest) as error:
                    self._nodes.refused(self._name, error)
                    self._drop()
                except TandemError as error:
                    self._nodes.failed(self._name, error)
                    self._drop()
            if self._closing:
                return
            self._wake.clear()

    async def _offer(self, hashes: tuple[bytes, ...], ended: SequenceEnded) -> None:
        """Raises TandemError where the node is gone or refuses."""
        client, worker_name = self._nodes.client(self._name), self._host.settings.name
        block_bytes, is_low = self._host.model.layout.block_bytes, ended.priority < 0
        wanted = await client.offer(worker_name, hashes, block_bytes, ended.tenant, ended.retain_s, is_low=is_low)
        if not wanted.indexes:
            return
        shipment = Shipment(
            self._host.transfer,
            wanted.transfer_address,
            wanted.ticket,
            len(wanted.indexes),
            partial(leaving, self._host.engine.blocks),
            lambda blocks: self._host.engine.submit(ReleaseHeld(tuple(block.block_id for block in blocks))),
            SEND_TIMEOUT_S,
            self._host.seal(Purpose.OFFER, wanted.ticket),
        )
        held = await self._exchange.hold(tuple(hashes[index] for index in wanted.indexes))
        shipment.add(*held.blocks)
        await shipment.finish(0, 0, finished=False)
        self.num_sent += shipment.num_blocks

    def _drop(self) -> None:
        self.num_dropped += 1 + len(self._waiting)
        self._waiting.clear()


class KVConnector:
    """Owns the offloaders, the fetches and the server of this worker's blocks. `start()`/`close()`; `on_event` takes
    the engine's events about blocks."""

    def __init__(
        self, host: EngineHost, stores: Mapping[str, str], credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`stores` are the store nodes, host:port by name. The host must be started."""
        # Not the engine itself: another one comes with other weights.
        self._exchange = BlockExchangeClient(lambda command: host.engine.submit(command))
        self._local = LocalBlocks()
        token = token_of(host.fleet_key)
        self._peers = Peers(credentials, token)
        self.nodes = StoreNodes(stores, credentials, token)
        self.offers = {name: StoreOffloader(host, name, self.nodes, self._exchange) for name in self.nodes.names}
        policy = FetchPolicy(host.settings.prefix_fetch)
        self.fetches = PrefixFetch(host, self.nodes, self._peers, self._exchange, self._local, policy)
        self.server = BlockServer(host, self._exchange, self._local)

    def start(self) -> None:
        """Does not wait for any store node."""
        for offers in self.offers.values():
            offers.start()

    def on_event(self, event: PoolChanged | SequenceEnded | ExchangeEvent) -> None:
        """An event of the engine about blocks."""
        match event:
            case PoolChanged(sealed, evicted):
                self._local.on_pool(sealed, evicted)
            case SequenceEnded():
                self._offer(event)
            case BlocksHeld() | FetchPrepared() | BlocksAdopted() | CacheFlushed():
                self._exchange.on_event(event)

    async def close(self) -> None:
        """Offers the waiting blocks for at most one second, then closes. Idempotent."""
        await self.fetches.close()
        await asyncio.gather(self.server.close(), *(offers.close() for offers in self.offers.values()))
        await self._peers.close()
        await self.nodes.close()

    def _offer(self, ended: SequenceEnded) -> None:
        """Offers each run of blocks to the reachable node that is responsible for it."""
        hashes = ended.block_hashes
        for name, indexes in by_keeper(hashes, ended.kept, self.nodes.live).items():
            self.offers[name].add(tuple(hashes[index] for index in indexes), ended)
