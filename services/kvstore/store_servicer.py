"""`tandem.v1.StoreService` over a StoreNode: validate, call, convert."""

from __future__ import annotations

from typing import Any

import grpc.aio

from services.kvstore.node import StoreNode
from services.kvstore.node_stats import pin_status, tier_stats_list
from services.kvstore.requests import pin_name_of, pin_of, tenant_of
from shared.kv_index.hash_lists import split_hashes
from shared.rpc.errors import answer
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

SERVICE_NAME = "tandem.v1.StoreService"

Context = grpc.aio.ServicerContext[Any, Any]


class StoreServicer(kvstore_pb2_grpc.StoreServiceServicer):
    """gRPC's view of a node."""

    def __init__(self, node: StoreNode, name: str = "") -> None:
        """Does not own the node; `name` names it in statistics."""
        self._node = node
        self._name = name

    async def Offer(self, request: kvstore_pb2.OfferRequest, context: Context) -> kvstore_pb2.OfferResponse:  # noqa: N802
        """Which of the offered blocks to send."""
        return await answer(self._offer(request), context)

    async def GetTierStats(  # noqa: N802
        self, request: kvstore_pb2.GetTierStatsRequest, context: Context
    ) -> kvstore_pb2.TierStatsList:
        """Size and use of each tier, by tenant too, and the pins."""
        return await answer(self._tier_stats(request), context)

    async def Pin(self, request: kvstore_pb2.PinRequest, context: Context) -> kvstore_pb2.PinResponse:  # noqa: N802
        """Protects blocks from eviction."""
        return await answer(self._pin(request), context)

    async def Unpin(self, request: kvstore_pb2.UnpinRequest, context: Context) -> kvstore_pb2.UnpinResponse:  # noqa: N802
        """Ends a pin."""
        return await answer(self._unpin(request), context)

    async def _offer(self, request: kvstore_pb2.OfferRequest) -> kvstore_pb2.OfferResponse:
        wanted = await self._node.offer(
            request.worker_name, split_hashes(request), request.block_bytes, tenant_of(request)
        )
        return kvstore_pb2.OfferResponse(
            wanted=wanted.indexes, ticket=wanted.ticket, transfer_address=wanted.transfer_address
        )

    async def _tier_stats(self, _request: kvstore_pb2.GetTierStatsRequest) -> kvstore_pb2.TierStatsList:
        return await self._node.with_tiers(lambda tiers: tier_stats_list(self._name, self._node.failure, tiers))

    async def _pin(self, request: kvstore_pb2.PinRequest) -> kvstore_pb2.PinResponse:
        pin = pin_of(request)
        await self._node.open(pin.block_bytes)
        return kvstore_pb2.PinResponse(pin=pin_status(await self._node.with_tiers(lambda tiers: tiers.pin(pin))))

    async def _unpin(self, request: kvstore_pb2.UnpinRequest) -> kvstore_pb2.UnpinResponse:
        pin = await self._node.with_tiers(lambda tiers: tiers.unpin(pin_name_of(request)))
        return kvstore_pb2.UnpinResponse(num_blocks=len(pin.block_hashes))
