"""`tandem cache stats` as tables."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.rpc.pb.tandem.v1 import cache_pb2, kvstore_pb2
from shared.sizes import size
from tandem_cli.console import share, table_of

_TIERS = {kvstore_pb2.TIER_DEVICE: "pool", kvstore_pb2.TIER_HOST: "host", kvstore_pb2.TIER_DISK: "disk"}


def show(console: Console, stats: cache_pb2.CacheStats) -> None:
    """Prints index, tiers, tenants and pins; empty parts are left out."""
    console.print(index_line(stats), markup=False)
    for line in failure_lines(stats):
        console.print(Text(line, style="red"))
    for table in (tier_table(stats), tenant_table(stats), pin_table(stats)):
        if table.row_count:
            console.print()
            console.print(table)


def index_line(stats: cache_pb2.CacheStats) -> str:
    """One line about the index."""
    if stats.index_failure:
        return f"index: {stats.index_failure}"
    index = stats.index
    return (
        f"index: {index.num_blocks} blocks in {size(index.index_bytes)} at {index.index_address}; "
        f"{index.num_match_requests} lookups, {share(index.num_hit_blocks, index.num_match_blocks)} "
        f"of {index.num_match_blocks} blocks found"
    )


def failure_lines(stats: cache_pb2.CacheStats) -> list[str]:
    """Nodes that do not answer, and tiers that fail."""
    lines = [f"store node {node.address} does not answer: {node.failure}" for node in stats.nodes if node.failure]
    lines += [
        f"store node {_name(node)}, {_TIERS[tier.tier]} tier: {tier.failure}"
        for node in stats.nodes
        for tier in node.stats.tiers
        if tier.failure
    ]
    return lines or ([] if stats.nodes else ["no store nodes: only the workers' pools keep blocks"])


def tier_table(stats: cache_pb2.CacheStats) -> Table:
    """One row a node and tier."""
    names = ("store node", "tier")
    figures = (
        "used",
        "budget",
        "full",
        "blocks",
        "hits",
        "stored",
        "evicted",
        "refused",
        "bad",
        "pinned",
        "retained",
        "by hints",
    )
    rows: list[tuple[str | Text, ...]] = []
    for node in stats.nodes:
        if not node.failure and not node.stats.tiers:
            rows.append((_name(node), "-", *("-" for _ in figures)))
        rows += [(_name(node), *_tier_cells(tier)) for tier in node.stats.tiers]
    return table_of((*names, *figures), rows, text=names)


def _tier_cells(tier: kvstore_pb2.TierStats) -> tuple[str | Text, ...]:
    return (
        _TIERS.get(tier.tier, "?"),
        size(tier.used_bytes),
        size(tier.budget_bytes),
        share(tier.used_bytes, tier.budget_bytes),
        f"{tier.num_blocks}",
        f"{tier.num_hits}",
        f"{tier.num_stored}",
        f"{tier.num_evicted}",
        f"{tier.num_refused}",
        Text(f"{tier.num_bad}", style="red" if tier.num_bad else ""),
        f"{size(tier.pinned_bytes)} of {size(tier.pin_budget_bytes)}",
        size(tier.retained_bytes),
        f"{tier.num_hint_hits}",
    )


def tenant_table(stats: cache_pb2.CacheStats) -> Table:
    """One row a tenant: prompt tokens saved at this router, and blocks kept in the nodes."""
    served_headers = ("requests", "prompt tokens", "not computed", "local", "peers", "store")
    held: dict[str, list[kvstore_pb2.TenantUse]] = defaultdict(list)
    for node in stats.nodes:
        for use in node.stats.tenants:
            held[use.tenant].append(use)
    served = {row.tenant: row for row in stats.tenants}
    rows = [
        (tenant or "-", *_served_cells(served.get(tenant)), *_held_cells(held[tenant]))
        for tenant in sorted({*held, *served})
        if held[tenant] or served[tenant].num_requests
    ]
    return table_of(("tenant", *served_headers, "host", "disk", "blocks", "hits", "evicted"), rows, text=("tenant",))


def _served_cells(row: cache_pb2.TenantTokens | None) -> tuple[str, ...]:
    """A tenant's prompt tokens, and the share of them that came from each place."""
    if row is None:
        return ("-",) * 6
    origins = (row.num_local_tokens, row.num_peer_tokens, row.num_store_tokens)
    shares = [share(count, row.num_prompt_tokens) for count in (sum(origins), *origins)]
    return (f"{row.num_requests}", f"{row.num_prompt_tokens}", *shares)


def _held_cells(uses: list[kvstore_pb2.TenantUse]) -> tuple[str, ...]:
    return (
        _held(uses, kvstore_pb2.TIER_HOST),
        _held(uses, kvstore_pb2.TIER_DISK),
        f"{sum(use.num_blocks for use in uses)}",
        f"{sum(use.num_hits for use in uses)}",
        f"{sum(use.num_evicted for use in uses)}",
    )


def pin_table(stats: cache_pb2.CacheStats) -> Table:
    """One row a pin, over all nodes."""
    pins: dict[tuple[str, str], list[kvstore_pb2.PinStatus]] = defaultdict(list)
    for node in stats.nodes:
        for pin in node.stats.pins:
            pins[pin.name, pin.tenant].append(pin)
    rows = []
    for (name, tenant), parts in pins.items():
        tiers = sorted({tier for part in parts for tier in part.tiers})
        words = ", ".join(_TIERS.get(tier, "?") for tier in tiers) or "-"
        blocks, here = sum(part.num_blocks for part in parts), sum(part.num_held for part in parts)
        rows.append((name, tenant, words, f"{blocks}", f"{here}"))
    names = ("pin", "tenant", "tiers")
    return table_of((*names, "blocks", "here"), rows, text=names)


def _name(node: cache_pb2.StoreNodeStats) -> str:
    return node.stats.node_name or node.address


def _held(uses: list[kvstore_pb2.TenantUse], tier: kvstore_pb2.Tier.ValueType) -> str:
    """`1.5 MiB of 4 MiB`, the quota of all nodes together."""
    here = [use for use in uses if use.tier == tier]
    if not here:
        return "-"
    quota = sum(use.quota_bytes for use in here)
    used = size(sum(use.used_bytes for use in here))
    return f"{used} of {size(quota)}" if quota else used
