"""`tandem cache stats` as tables."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table

from shared.rpc.pb.tandem.v1 import cache_pb2, kvstore_pb2
from shared.sizes import size

_TIERS = {kvstore_pb2.TIER_DEVICE: "pool", kvstore_pb2.TIER_HOST: "host", kvstore_pb2.TIER_DISK: "disk"}


def share(part: int, whole: int) -> str:
    """`25 %`; `-` where the whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def show(console: Console, stats: cache_pb2.CacheStats) -> None:
    """Prints index, tiers, tenants and pins; empty parts are left out."""
    console.print(index_line(stats), markup=False)
    for line in failure_lines(stats):
        console.print(f"[red]{line}[/red]" if "[" not in line else line, markup="[" not in line)
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
    table = _table("store node", "tier")
    for header in ("used", "budget", "full", "blocks", "hits", "stored", "evicted", "refused", "bad", "pinned"):
        table.add_column(header, justify="right", no_wrap=True)
    for node in stats.nodes:
        if not node.failure and not node.stats.tiers:
            table.add_row(_name(node), "-", *(["-"] * 10))
        for tier in node.stats.tiers:
            table.add_row(
                _name(node),
                _TIERS.get(tier.tier, "?"),
                size(tier.used_bytes),
                size(tier.budget_bytes),
                share(tier.used_bytes, tier.budget_bytes),
                f"{tier.num_blocks}",
                f"{tier.num_hits}",
                f"{tier.num_stored}",
                f"{tier.num_evicted}",
                f"{tier.num_refused}",
                f"[red]{tier.num_bad}[/red]" if tier.num_bad else "0",
                f"{size(tier.pinned_bytes)} of {size(tier.pin_budget_bytes)}",
            )
    return table


def tenant_table(stats: cache_pb2.CacheStats) -> Table:
    """One row a tenant: prompt tokens saved at this router, and blocks kept in the nodes."""
    table = _table("tenant")
    for header in ("requests", "prompt tokens", "not computed", "local", "peers", "store"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("host", "disk", "blocks", "hits", "evicted"):
        table.add_column(header, justify="right", no_wrap=True)
    held: dict[str, list[kvstore_pb2.TenantUse]] = defaultdict(list)
    for node in stats.nodes:
        for use in node.stats.tenants:
            held[use.tenant].append(use)
    served = {row.tenant: row for row in stats.tenants}
    for tenant in sorted({*held, *served}):
        row, uses = served.get(tenant, cache_pb2.TenantTokens()), held[tenant]
        if not uses and not row.num_requests:
            continue
        saved = row.num_local_tokens + row.num_peer_tokens + row.num_store_tokens
        table.add_row(
            tenant or "-",
            *(_count(tenant in served, count) for count in (row.num_requests, row.num_prompt_tokens)),
            share(saved, row.num_prompt_tokens),
            *(
                share(count, row.num_prompt_tokens)
                for count in (row.num_local_tokens, row.num_peer_tokens, row.num_store_tokens)
            ),
            *(_held(uses, tier) for tier in (kvstore_pb2.TIER_HOST, kvstore_pb2.TIER_DISK)),
            f"{sum(use.num_blocks for use in uses)}",
            f"{sum(use.num_hits for use in uses)}",
            f"{sum(use.num_evicted for use in uses)}",
        )
    return table


def pin_table(stats: cache_pb2.CacheStats) -> Table:
    """One row a pin, over all nodes."""
    table = _table("pin", "tenant", "tiers")
    for header in ("blocks", "here"):
        table.add_column(header, justify="right", no_wrap=True)
    pins: dict[tuple[str, str], list[kvstore_pb2.PinStatus]] = defaultdict(list)
    for node in stats.nodes:
        for pin in node.stats.pins:
            pins[pin.name, pin.tenant].append(pin)
    for (name, tenant), parts in pins.items():
        tiers = sorted({tier for part in parts for tier in part.tiers})
        table.add_row(
            name,
            tenant,
            ", ".join(_TIERS.get(tier, "?") for tier in tiers) or "-",
            f"{sum(part.num_blocks for part in parts)}",
            f"{sum(part.num_held for part in parts)}",
        )
    return table


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, no_wrap=True)
    return table


def _name(node: cache_pb2.StoreNodeStats) -> str:
    return node.stats.node_name or node.address


def _count(known: bool, count: int) -> str:
    return f"{count}" if known else "-"


def _held(uses: list[kvstore_pb2.TenantUse], tier: kvstore_pb2.Tier.ValueType) -> str:
    """`1.5 MiB of 4 MiB`, the quota of all nodes together."""
    here = [use for use in uses if use.tier == tier]
    if not here:
        return "-"
    quota = sum(use.quota_bytes for use in here)
    used = size(sum(use.used_bytes for use in here))
    return f"{used} of {size(quota)}" if quota else used
