"""`tandem.v1.StoreService` over a StoreNode: validate, call, convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from services.kvstore.requests import keep_of, pin_name_of, pin_of, tenant_of
from services.kvstore.store_node import StoreNode
from services.kvstore.tiers.stack import PinState, TierStack
from services.kvstore.tiers.tier import BlockTier
from shared.kv_index.holders import Tier, split_hashes
from shared.rpc.errors import answer
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

SERVICE_NAME = "tandem.v1.StoreService"

Context = grpc.aio.ServicerContext[Any, Any]
MAX_TENANTS = 1000
"""Most accounts in one message; those with most bytes are kept."""


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
            request.worker_name, split_hashes(request), request.block_bytes, tenant_of(request), keep_of(request)
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


def tier_stats_list(name: str, failure: Callable[[Tier], str], tiers: TierStack) -> kvstore_pb2.TierStatsList:
    """Everything of one node. `failure` returns why the last call on a tier failed. Call it in the tiers' thread."""
    uses = [use for tier in tiers.tiers for use in _tenant_uses(tier)]
    uses.sort(key=lambda use: -use.used_bytes)
    return kvstore_pb2.TierStatsList(
        node_name=name,
        tiers=[_tier_stats(tier, failure(tier.tier)) for tier in tiers.tiers],
        tenants=uses[:MAX_TENANTS],
        pins=[pin_status(state) for state in tiers.pins()],
    )


def pin_status(state: PinState) -> kvstore_pb2.PinStatus:
    """One pin."""
    return kvstore_pb2.PinStatus(
        name=state.pin.name,
        tenant=state.pin.tenant,
        num_blocks=len(state.pin.block_hashes),
        num_held=state.num_held,
        tiers=[kvstore_pb2.Tier.ValueType(tier) for tier in state.tiers],
    )


def _tier_stats(tier: BlockTier, failure: str) -> kvstore_pb2.TierStats:
    counters, pins = tier.counters, tier.blocks.pins
    return kvstore_pb2.TierStats(
        tier=kvstore_pb2.Tier.ValueType(tier.tier),
        used_bytes=tier.blocks.used_bytes,
        budget_bytes=tier.blocks.budget_bytes,
        num_hits=counters.num_hits,
        num_misses=counters.num_misses,
        num_stored=counters.num_stored,
        num_evicted=counters.num_evicted,
        num_refused=counters.num_refused,
        num_bad=counters.num_bad,
        failure=failure,
        num_blocks=len(tier.blocks),
        pinned_bytes=pins.used_bytes,
        pin_budget_bytes=pins.budget_bytes,
        retained_bytes=tier.blocks.retained_bytes,
        num_hint_hits=tier.blocks.num_hint_hits,
    )


def _tenant_uses(tier: BlockTier) -> list[kvstore_pb2.TenantUse]:
    accounts = tier.blocks.accounts
    return [
        kvstore_pb2.TenantUse(
            tenant=tenant,
            tier=kvstore_pb2.Tier.ValueType(tier.tier),
            used_bytes=account.used_bytes,
            quota_bytes=accounts.quotas.of(tenant),
            num_blocks=account.num_blocks,
            num_hits=account.num_hits,
            num_evicted=account.num_evicted,
        )
        for tenant, account in accounts.all().items()
    ]
