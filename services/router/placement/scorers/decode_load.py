"""Scores a decode worker by the room it has left."""

from __future__ import annotations

from services.router.placement.views import PlacementRequest, WorkerView


def can_hold(view: WorkerView, need: PlacementRequest) -> bool:
    """Filter: a place in the batch, and free blocks for what it does not hold yet plus one a running request."""
    return (
        view.accepting
        and view.num_requests < view.max_num_seqs
        and missing_blocks(need, view.name) + view.num_requests <= view.num_free_blocks
    )


def decode_load(view: WorkerView, need: PlacementRequest, least_hit: float = 0.0) -> float:
    """The mean of two shares: blocks free after this request, places free in the batch. Hits of fewer tokens than
    `least_hit` count as none."""
    blocks = max(0, view.num_free_blocks - missing_blocks(need, view.name, least_hit)) / max(1, view.num_total_blocks)
    places = max(0, view.max_num_seqs - view.num_requests) / max(1, view.max_num_seqs)
    return min(1.0, (blocks + places) / 2)


def missing_blocks(need: PlacementRequest, name: str, least_hit: float = 0.0) -> int:
    """Blocks that the worker does not hold yet."""
    return max(0, need.num_blocks - need.num_hit_tokens(name, least_hit) // need.block_size)
