"""A KV store process's metrics: their definitions and sources. They are read only when the page is requested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.kvstore.availability import Availability
from services.kvstore.index.sweeper import SweepCounters
from services.kvstore.resp.counted import BUCKETS_S, CountedRedis
from services.kvstore.servicer import IndexCounters
from services.kvstore.store_node import StoreNode
from services.kvstore.tiers.tier import BlockTier
from shared.telemetry.metrics import Metric, Observed, counter, gauge, histogram


@dataclass(frozen=True, slots=True)
class KVStoreSources:
    """The objects that hold a KV store's figures."""

    index: IndexCounters
    sweeps: SweepCounters
    availability: Availability
    redis: CountedRedis


METRICS: tuple[Observed[KVStoreSources], ...] = (
    Observed(
        gauge("tandem_index_available", "1 while Redis answered the last probe; 0 while calls are refused."),
        lambda store: store.availability.available,
    ),
    Observed(
        histogram(
            "tandem_index_redis_seconds",
            "Round trips to Redis by connection, those that failed included.",
            BUCKETS_S,
            "connection",
        ),
        lambda store: store.redis.round_trips_s,
    ),
    Observed(
        counter("tandem_index_matches_total", "Prefix look-ups answered."),
        lambda store: store.index.num_matches,
    ),
    Observed(
        counter("tandem_index_match_blocks_total", "Blocks that look-ups asked for."),
        lambda store: store.index.num_match_blocks,
    ),
    Observed(
        counter("tandem_index_hit_blocks_total", "Of these, blocks of the prefix that a holder was found for."),
        lambda store: store.index.num_hit_blocks,
    ),
    Observed(
        counter("tandem_index_published_blocks_total", "Blocks that got another holder."),
        lambda store: store.index.num_published_blocks,
    ),
    Observed(
        counter("tandem_index_removed_blocks_total", "Blocks from which a holder was removed at its own request."),
        lambda store: store.index.num_removed_blocks,
    ),
    Observed(
        counter("tandem_index_resyncs_total", "Requests to a holder to publish all its blocks again."),
        lambda store: store.index.num_resyncs,
    ),
    Observed(
        counter("tandem_index_sweeps_total", "Checks of the index for records of dead holders."),
        lambda store: store.sweeps.num_sweeps,
    ),
    Observed(
        counter("tandem_index_pruned_records_total", "Records of dead holders that sweeps removed."),
        lambda store: store.sweeps.num_pruned,
    ),
    Observed(
        counter("tandem_index_expired_holders_total", "Holders forgotten because they sent nothing for a whole lease."),
        lambda store: store.sweeps.num_expired,
    ),
)


def _by_tier(read: Callable[[BlockTier], float]) -> Callable[[StoreNode], Mapping[str, float]]:
    return lambda node: {tier.tier.name.lower(): read(tier) for tier in tuple(node.tiers)}


def _tier(metric: Metric, read: Callable[[BlockTier], float]) -> Observed[StoreNode]:
    return Observed(metric, _by_tier(read))


NODE_METRICS: tuple[Observed[StoreNode], ...] = (
    _tier(gauge("tandem_store_used_bytes", "Bytes of the blocks held.", "tier"), lambda tier: tier.blocks.used_bytes),
    _tier(gauge("tandem_store_budget_bytes", "Most bytes of blocks.", "tier"), lambda tier: tier.blocks.budget_bytes),
    _tier(
        gauge("tandem_store_pinned_bytes", "Bytes of the pinned blocks, held or not.", "tier"),
        lambda tier: tier.blocks.pins.used_bytes,
    ),
    _tier(gauge("tandem_store_blocks", "Blocks held.", "tier"), lambda tier: len(tier.blocks)),
    _tier(
        counter("tandem_store_hits_total", "Reads of a block that was there.", "tier"),
        lambda tier: tier.counters.num_hits,
    ),
    _tier(
        counter(
            "tandem_store_hint_hits_total", "Of the hits, those of blocks that would be gone if not retained.", "tier"
        ),
        lambda tier: tier.blocks.num_hint_hits,
    ),
    _tier(
        gauge("tandem_store_retained_bytes", "Bytes of blocks that are evicted after others.", "tier"),
        lambda tier: tier.blocks.retained_bytes,
    ),
    _tier(
        counter("tandem_store_misses_total", "Reads of a block that was not there.", "tier"),
        lambda tier: tier.counters.num_misses,
    ),
    _tier(
        counter("tandem_store_stored_blocks_total", "Blocks stored.", "tier"),
        lambda tier: tier.counters.num_stored,
    ),
    _tier(
        counter("tandem_store_evicted_blocks_total", "Blocks evicted to make room.", "tier"),
        lambda tier: tier.counters.num_evicted,
    ),
    _tier(
        counter(
            "tandem_store_refused_blocks_total", "Blocks not admitted: offered once while full, or no room.", "tier"
        ),
        lambda tier: tier.counters.num_refused,
    ),
    _tier(
        counter("tandem_store_bad_blocks_total", "Blocks whose bytes did not match their checksum; dropped.", "tier"),
        lambda tier: tier.counters.num_bad,
    ),
    Observed(
        gauge("tandem_store_failing", "1 while the last call on the tier failed, else 0.", "tier"),
        lambda node: {tier.tier.name.lower(): bool(node.failure(tier.tier)) for tier in tuple(node.tiers)},
    ),
    Observed(
        counter("tandem_transfer_sent_bytes_total", "Bytes of KV blocks sent to workers."),
        lambda node: node.transfer_counters.bytes_sent,
    ),
    Observed(
        gauge("tandem_transfer_endpoints", "Open UCX endpoints to workers."),
        lambda node: node.transfer_counters.num_endpoints,
    ),
    Observed(
        counter("tandem_transfer_received_bytes_total", "Bytes of KV blocks received from workers."),
        lambda node: node.transfer_counters.bytes_received,
    ),
)
"""Metrics of a process with tiers."""
