"""Workers that hold blocks and compute nothing: real pools, exchanges and gRPC, a transfer plane within the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import numpy as np

from services.worker.blocks.connector import KVConnector
from services.worker.blocks.prefix_fetch.fetch import Fetch, PrefixHint
from shared.block_service.servicer import SERVICE_NAME, BlockServicer
from shared.engine.block_exchange import BlockExchange
from shared.engine.messages import (
    AdoptBlocks,
    BlocksAdopted,
    BlocksHeld,
    EndFetch,
    FetchPrepared,
    HoldBlocks,
    PoolChanged,
    PrepareFetch,
    ReleaseHeld,
)
from shared.kv.fleet_key import FleetKey, seal_of, token_of
from shared.kv.groups import KVGroups
from shared.kv.hashing import chain
from shared.kv.pool import BlockPool, OutgoingBlock
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import kvstore_pb2_grpc
from shared.rpc.server import RpcServer
from tests.local_transfer import LocalPlane, LocalTransfer
from tests.waiting import DEADLINE_S, until

BLOCK_SIZE = 16
BLOCK_BYTES = 256
NUM_BLOCKS = 200
ROOT = bytes(16)


class Engine:
    """The part of an engine that deals with blocks of others; answers in the loop's next turn."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.memory = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.exchange = BlockExchange(self.pool, self._checksums)
        self.emit = lambda _event: None
        self.blocks = SimpleNamespace(
            incoming=lambda block_ids: list(map(self._bytes, block_ids)),
            waits_for_copies=False,
            outgoing=lambda block_ids: [self._bytes(block_id) for block_id in block_ids],
            store=lambda _arrived: None,
        )

    def submit(self, command) -> None:
        match command:
            case HoldBlocks(key, hashes):
                held = tuple(
                    OutgoingBlock("", block.index, block.block_id, self._checksum_of(block.block_id))
                    for block in self.exchange.hold(key, hashes)
                )
                self._say(BlocksHeld(key, held))
            case ReleaseHeld(block_ids):
                self.pool.release(block_ids)
            case PrepareFetch(key, hashes, room):
                self._say(FetchPrepared(key, self.exchange.prepare(key, hashes, 0, 1 + room)))
            case AdoptBlocks(key, checksums, num_damaged):
                self._say(BlocksAdopted(key, self.exchange.adopt(key, checksums, num_damaged)))
            case EndFetch(key, lost):
                self.exchange.end(key, lost)
        events = self.pool.drain_events()
        self._say(PoolChanged(tuple(events.sealed), tuple(events.evicted)))

    def _say(self, event) -> None:
        asyncio.get_running_loop().call_soon(lambda: self.emit(event))

    def _bytes(self, block_id: int) -> memoryview:
        return memoryview(self.memory[block_id])

    def _checksums(self, block_ids: list[int]) -> list[int]:
        return [int(self.memory[block_id].astype(np.uint64).sum()) for block_id in block_ids]

    def _checksum_of(self, block_id: int) -> int:
        known = self.pool.checksum_of(block_id)
        return self._checksums([block_id])[0] if known is None else known


class Worker:
    """One of them, on any free port."""

    def __init__(
        self, plane: LocalPlane, name: str, stores: dict[str, str], mode: str, key: FleetKey | None = None
    ) -> None:
        self.engine = Engine()
        self.transfer = LocalTransfer(plane)
        layout = SimpleNamespace(block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES, groups=KVGroups(BLOCK_SIZE))
        host = SimpleNamespace(
            fleet_key=key,
            seal=lambda purpose, ticket: seal_of(key, purpose, ticket, BLOCK_BYTES),
            engine=self.engine,
            transfer=self.transfer,
            model=SimpleNamespace(layout=layout, num_blocks=NUM_BLOCKS),
            settings=SimpleNamespace(name=name, prefix_fetch=mode),
        )
        self._token = token_of(key)
        self.connector = KVConnector(host, stores)  # type: ignore[arg-type]
        self.engine.emit = self.connector.on_event
        self.rpc = RpcServer("127.0.0.1:0", self._register, (SERVICE_NAME,))

    def _register(self, server) -> None:
        kvstore_pb2_grpc.add_BlockServiceServicer_to_server(
            BlockServicer(self.connector.server, FleetGuard(self._token)), server
        )

    @property
    def address(self) -> str:
        return self.rpc.address

    async def has(self, hashes) -> None:
        """Puts blocks into the pool, each with bytes and a checksum of its own."""
        ids = self.engine.pool.allocate(len(hashes))
        for block_id, name in zip(ids, hashes, strict=True):
            self.engine.memory[block_id] = np.frombuffer(name * (BLOCK_BYTES // 16), np.uint8)
            self.engine.pool.seal(block_id, name)
            self.engine.pool.set_checksum(block_id, self.engine._checksums([block_id])[0])
        self.engine.pool.release(ids)
        self.engine.submit(ReleaseHeld(()))
        await asyncio.sleep(0)

    async def loses(self, hashes) -> None:
        """Has these blocks no more."""
        ids = [self.engine.pool.match([name])[0] for name in hashes]
        self.engine.pool.acquire(ids)
        self.engine.pool.forget(ids)
        self.engine.pool.release(ids)
        self.engine.submit(ReleaseHeld(()))

    def damage(self, name: bytes) -> None:
        """Flips a bit of a block in the pool."""
        self.engine.memory[self.engine.pool.match([name])[0], 7] ^= 16

    async def fetch(self, tokens, peers=(), num_stored=0) -> Fetch:
        """What fetching the prefix of these tokens brought, at its end."""
        sequence = SimpleNamespace(
            block_hashes=[], hash_root=ROOT, token_ids=tokens, num_tokens=len(tokens), sequence_id="a"
        )
        fetch = Fetch()
        known = PrefixHint(num_stored, tuple((peer.address, count) for peer, count in peers))
        for peer, _ in peers:
            if (client := self.connector._peers.client(peer.address)) is not None:
                client._look_up_timeout_s = DEADLINE_S
        async with asyncio.timeout(DEADLINE_S):
            await self.connector.fetches.hold(sequence, known, fetch)  # type: ignore[arg-type]
            if fetch.task is not None:
                await asyncio.wait({fetch.task})
                fetch.task.result()
        await asyncio.sleep(0)
        return fetch

    def found(self, hashes) -> list[int]:
        """Which of these blocks are here, with their right bytes."""
        here = [index for index, name in enumerate(hashes) if self.engine.pool.match([name])]
        for index in here:
            (block_id,) = self.engine.pool.match([hashes[index]])
            assert bytes(self.engine.memory[block_id]) == hashes[index] * (BLOCK_BYTES // 16)
        return here

    async def idle(self) -> None:
        """Waits until nobody holds a block, and checks the pool."""
        await until(lambda: not self.engine.pool.num_used)
        self.engine.pool.check_integrity()


@contextlib.asynccontextmanager
async def workers(
    count: int, stores: dict[str, str] | None = None, mode: str = "always", key: FleetKey | None = None
) -> AsyncIterator[list[Worker]]:
    """Several on one plane."""
    plane = LocalPlane()
    group = [Worker(plane, f"w{number}", stores or {}, mode, key) for number in range(count)]
    try:
        for worker in group:
            await worker.transfer.start()
            await worker.rpc.start()
            worker.connector.start()
        yield group
    finally:
        for worker in group:
            await worker.rpc.stop(0.1)
            await worker.connector.close()
        for worker in group:
            await worker.transfer.close()


def prompt(num_blocks: int) -> tuple[list[int], list[bytes]]:
    """Tokens that fill that number of blocks and one token more, and the blocks' hashes."""
    tokens = [20 + i * 37 % 2000 for i in range(num_blocks * BLOCK_SIZE + 1)]
    return tokens, chain(ROOT, tokens, BLOCK_SIZE)
