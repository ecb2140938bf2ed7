"""Which block of a prefix is fetched from which source. Policy only: plain numbers.

Pools of peers come before store nodes, as in the router's score: memory before what may be a disk. Where several peers
hold a block, whole pieces of a chain go to the one that has the least to send, so that all of them send at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

PIECE_BLOCKS = 16
"""Neighbouring blocks that come from the same peer."""


def plan_fetch(
    missing: Iterable[int], peers: Mapping[str, Set[int]], stores: Mapping[str, Set[int]]
) -> dict[str, list[int]]:
    """Block indexes by source, ascending, each block once; blocks that no source has are left out.

    `peers` and `stores` say which of the blocks each source has.
    """
    plan: dict[str, list[int]] = {source: [] for source in (*peers, *stores)}
    piece, last = -1, ""
    for index in sorted(missing, reverse=True):
        if index // PIECE_BLOCKS != piece:
            piece, last = index // PIECE_BLOCKS, ""
        holders = [peer for peer in peers if index in peers[peer]] or [node for node in stores if index in stores[node]]
        if not holders:
            continue
        if last not in holders:
            last = min(holders, key=lambda source: len(plan[source]))
        plan[last].append(index)
    return {source: indexes[::-1] for source, indexes in plan.items() if indexes}
