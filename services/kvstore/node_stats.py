"""A store node's contents as messages: by tier, by tenant, and its pins."""

from __future__ import annotations

from collections.abc import Callable

from services.kvstore.tiers.stack import PinState, TierStack
from services.kvstore.tiers.tier import BlockTier
from shared.kv_index.holders import Tier
from shared.rpc.pb.tandem.v1 import kvstore_pb2

MAX_TENANTS = 1000
"""Most accounts in one message; those with most bytes are kept."""


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
        used_bytes=tier.used_bytes,
        budget_bytes=tier.budget_bytes,
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
