"""Async client of a store node: what it has, what it wants, how full it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from shared.block_service.client import BlockClient
from shared.errors import StoreUnavailable
from shared.kv_index.holders import join_hashes
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

OFFER_TIMEOUT_S = 2.0

ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a store node asks for of an offer."""

    indexes: tuple[int, ...]
    """In the offer; a block's index on the transfer plane is its place in this tuple."""
    ticket: int
    transfer_address: bytes


class StoreClient(BlockClient):
    """One store node. Every method raises as those of a BlockClient."""

    async def offer(self, worker_name: str, hashes: Sequence[bytes], block_bytes: int, tenant: str = "") -> Wanted:
        """Which of these blocks, a tenant's, the node wants to be sent; it waits for them, and for a trailer, unless
        none."""
        request = kvstore_pb2.OfferRequest(
            worker_name=worker_name, block_hashes=join_hashes(hashes), block_bytes=block_bytes, tenant=tenant
        )
        answer = await self._call(lambda stub: stub.Offer(request, timeout=OFFER_TIMEOUT_S))
        if any(index >= len(hashes) for index in answer.wanted):
            raise StoreUnavailable(f"store {self.address} wants blocks that nobody offered")
        return Wanted(tuple(answer.wanted), answer.ticket, answer.transfer_address)

    async def tier_stats(self) -> list[kvstore_pb2.TierStats]:
        """Size and use of the node's tiers."""
        request = kvstore_pb2.GetTierStatsRequest()
        return list((await self._call(lambda stub: stub.GetTierStats(request, timeout=OFFER_TIMEOUT_S))).tiers)

    async def _call(self, call: Callable[[kvstore_pb2_grpc.StoreServiceAsyncStub], Awaitable[ResponseT]]) -> ResponseT:
        stub: kvstore_pb2_grpc.StoreServiceAsyncStub = kvstore_pb2_grpc.StoreServiceStub(self.connected())
        try:
            return await call(stub)
        except grpc.aio.AioRpcError as error:
            raise self.translate(error) from error
