"""Scores a worker by how much of the prompt need not be computed there, weighted by how far away its KV lies."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.placement.views import PlacementRequest, WorkerView


@dataclass(frozen=True, slots=True)
class TierWeights:
    """Worth of a prompt token's KV by its place; local ≥ peer ≥ store."""

    local: float = 1.0
    peer: float = 0.5
    store: float = 0.25


def prefix_hit(view: WorkerView, need: PlacementRequest, tiers: TierWeights, least_hit: float = 0.0) -> float:
    """(w_local · local + w_peer · (peer − local) + w_store · (store − max(local, peer))) / prompt tokens.

    Negative differences count as 0: a farther place matters for what the nearer ones do not hold. So do local hits of
    fewer tokens than `least_hit`.
    """
    hits = need.hits
    local = need.num_hit_tokens(view.name, least_hit)
    worth = tiers.local * local
    if hits.peer > local:
        worth += tiers.peer * (hits.peer - local)
    near = max(local, hits.peer)
    if hits.store > near:
        worth += tiers.store * (hits.store - near)
    return min(1.0, worth / max(1, need.num_tokens))
