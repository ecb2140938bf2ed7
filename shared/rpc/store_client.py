"""Async client of a store node: what it wants, what it has, and what it sends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from shared.errors import DeadlineExceeded, StoreUnavailable, TandemError, WorkerLost
from shared.rpc.block_holders import Tier, join_hashes
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc
from shared.rpc.server import channel

LOOK_UP_TIMEOUT_S = 0.25
OFFER_TIMEOUT_S = 2.0

ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a store node asks for of an offer."""

    indexes: tuple[int, ...]
    """In the offer; a block's index on the transfer plane is its place in this tuple."""
    ticket: int
    transfer_address: bytes


@dataclass(frozen=True, slots=True)
class SentBlock:
    """A block that the node is sending."""

    index: int
    checksum: int
    tier: Tier


class StoreClient:
    """One store node. Connects on first use, reconnects by itself; safe for any number of concurrent calls.

    Every method raises StoreUnavailable when the node does not answer in time, at once where that is known, and the
    node's own typed errors.
    """

    def __init__(self, address: str, *, look_up_timeout_s: float = LOOK_UP_TIMEOUT_S) -> None:
        """`address` is host:port."""
        self.address = address
        self._look_up_timeout_s = look_up_timeout_s
        self._channel: grpc.aio.Channel | None = None
        self._stub: kvstore_pb2_grpc.StoreServiceAsyncStub | None = None
        self._closed = False

    async def offer(self, worker_name: str, hashes: Sequence[bytes], block_bytes: int) -> Wanted:
        """Which of these blocks the node wants to be sent; it waits for them, and for a trailer, unless none."""
        request = kvstore_pb2.OfferRequest(
            worker_name=worker_name, block_hashes=join_hashes(hashes), block_bytes=block_bytes
        )
        answer = await self._call(lambda stub: stub.Offer(request, timeout=OFFER_TIMEOUT_S))
        if any(index >= len(hashes) for index in answer.wanted):
            raise StoreUnavailable(f"store {self.address} wants blocks that nobody offered")
        return Wanted(tuple(answer.wanted), answer.ticket, answer.transfer_address)

    async def look_up(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the chain the node has, from the first on."""
        request = kvstore_pb2.LookUpRequest(block_hashes=join_hashes(hashes))
        answer = await self._call(lambda stub: stub.LookUp(request, timeout=self._look_up_timeout_s))
        return min(answer.num_blocks, len(hashes))

    async def fetch(
        self, hashes: Sequence[bytes], block_bytes: int, ticket: int, transfer_address: bytes, timeout_s: float
    ) -> AsyncGenerator[list[SentBlock], None]:
        """Has blocks sent to receives of `ticket` at `transfer_address`, the last first; batch by batch."""
        request = kvstore_pb2.FetchRequest(
            block_hashes=join_hashes(hashes), block_bytes=block_bytes, ticket=ticket, transfer_address=transfer_address
        )
        try:
            async for part in self._connected().Fetch(request, timeout=timeout_s):
                if any(index >= len(hashes) for index in part.block_indexes):
                    raise StoreUnavailable(f"store {self.address} sends blocks that nobody asked for")
                yield [
                    SentBlock(index, checksum, Tier(tier))
                    for index, checksum, tier in zip(part.block_indexes, part.checksums, part.tiers, strict=True)
                ]
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    async def tier_stats(self) -> list[kvstore_pb2.TierStats]:
        """Size and use of the node's tiers."""
        request = kvstore_pb2.GetTierStatsRequest()
        return list((await self._call(lambda stub: stub.GetTierStats(request, timeout=OFFER_TIMEOUT_S))).tiers)

    async def close(self) -> None:
        """Ends the connection; twice is fine."""
        self._closed = True
        self._stub = None
        if self._channel is not None:
            connection, self._channel = self._channel, None
            await connection.close()

    async def _call(self, call: Callable[[kvstore_pb2_grpc.StoreServiceAsyncStub], Awaitable[ResponseT]]) -> ResponseT:
        try:
            return await call(self._connected())
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    def _connected(self) -> kvstore_pb2_grpc.StoreServiceAsyncStub:
        if self._closed:
            raise StoreUnavailable(f"the client of store {self.address} is closed")
        if self._stub is None:
            self._channel = channel(self.address)
            self._stub = kvstore_pb2_grpc.StoreServiceStub(self._channel)
        return self._stub

    def _translate(self, error: grpc.aio.AioRpcError) -> TandemError:
        meant = from_rpc_error(error, f"store {self.address}")
        if isinstance(meant, WorkerLost | DeadlineExceeded):
            return StoreUnavailable(meant.message, address=self.address)
        return meant
