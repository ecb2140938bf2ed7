"""Async client of a store node: offers of blocks by workers; statistics and pins for administrators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from shared.block_service.client import BlockClient
from shared.errors import StoreUnavailable
from shared.kv_index.holders import join_hashes
from shared.rpc.errors import from_store_error
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

OFFER_TIMEOUT_S = 2.0
STATS_TIMEOUT_S = 2.0
OPERATOR_TIMEOUT_S = 10.0
"""Timeout of a pin or a flush, which may read or delete files."""

ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The blocks of an offer that a store node accepts."""

    indexes: tuple[int, ...]
    """Indexes in the offer. On the transfer plane a block's index is its position in this tuple."""
    ticket: int
    transfer_address: bytes


class StoreClient(BlockClient):
    """One store node. Every method raises like those of BlockClient."""

    async def offer(
        self,
        worker_name: str,
        hashes: Sequence[bytes],
        block_bytes: int,
        tenant: str = "",
        retain_s: float = 0.0,
        *,
        is_low: bool = False,
    ) -> Wanted:
        """Asks which of these blocks of a tenant the node accepts. If there are any, the node then waits for them and
        for a trailer on the transfer plane."""
        request = kvstore_pb2.OfferRequest(
            worker_name=worker_name,
            block_hashes=join_hashes(hashes),
            block_bytes=block_bytes,
            tenant=tenant,
            retain_s=retain_s,
            is_low=is_low,
        )
        answer = await self._call(lambda stub: stub.Offer(request, timeout=OFFER_TIMEOUT_S))
        if any(index >= len(hashes) for index in answer.wanted):
            raise StoreUnavailable(f"store {self.address} wants blocks that were not offered")
        return Wanted(tuple(answer.wanted), answer.ticket, answer.transfer_address)

    async def stats(self) -> kvstore_pb2.TierStatsList:
        """The node's tiers, tenants and pins."""
        request = kvstore_pb2.GetTierStatsRequest()
        return await self._call(lambda stub: stub.GetTierStats(request, timeout=STATS_TIMEOUT_S))

    async def pin(self, request: kvstore_pb2.PinRequest) -> kvstore_pb2.PinStatus:
        """Keeps blocks until they are unpinned. Raises InvalidRequest if there is no room for them."""
        return (await self._call(lambda stub: stub.Pin(request, timeout=OPERATOR_TIMEOUT_S))).pin

    async def unpin(self, name: str) -> kvstore_pb2.PinStatus:
        """Ends a pin. Raises NotFound."""
        request = kvstore_pb2.UnpinRequest(name=name)
        ended = await self._call(lambda stub: stub.Unpin(request, timeout=OPERATOR_TIMEOUT_S))
        return kvstore_pb2.PinStatus(name=name, num_blocks=ended.num_blocks)

    async def _call(self, call: Callable[[kvstore_pb2_grpc.StoreServiceAsyncStub], Awaitable[ResponseT]]) -> ResponseT:
        stub: kvstore_pb2_grpc.StoreServiceAsyncStub = kvstore_pb2_grpc.StoreServiceStub(self.connected())
        try:
            return await call(stub)
        except grpc.aio.AioRpcError as error:
            raise from_store_error(error, self.address) from error
