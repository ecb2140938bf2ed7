"""Scores a worker by how much of the prompt need not be computed there, weighted by how far away its KV lies."""

from __future__ import annotations

from services.router.placement.scorers.scorer import Scorer, ScoringContext, TierWeights
from services.router.placement.views import WorkerView

_OWN_POOL = TierWeights(1.0, 0.0, 0.0)  # a decode worker fetches from nowhere


def prefix_hit(view: WorkerView, context: ScoringContext, tiers: TierWeights) -> float:
    """(w_local · local + w_peer · (peer − local) + w_store · (store − max(local, peer))) / prompt tokens.

    Negative differences count as 0: a farther place matters for what the nearer ones do not hold. So do local hits of
    fewer tokens than the context's `least_hit`.
    """
    request = context.request
    hits = request.hits
    local = request.num_hit_tokens(view.name, context.least_hit)
    worth = tiers.local * local
    if hits.peer > local:
        worth += tiers.peer * (hits.peer - local)
    near = max(local, hits.peer)
    if hits.store > near:
        worth += tiers.store * (hits.store - near)
    return min(1.0, worth / max(1, request.num_tokens))


SCORER = Scorer(
    setting="prefix",
    name="prefix",
    stages=("prefill",),
    default_weight=1.0,
    doc="Prefill worker: much of the prompt need not be computed.",
    score=lambda view, context: prefix_hit(view, context, context.tiers),
    applies=lambda context: bool(context.request.hits.local or context.request.hits.store),
)
DECODE_SCORER = Scorer(
    setting="decode_prefix",
    name="prefix",
    stages=("decode", "collocated"),
    default_weight=1.0,
    doc="Decode worker: holds much of the prompt, which need not travel.",
    score=lambda view, context: prefix_hit(view, context, _OWN_POOL),
    applies=lambda context: bool(context.request.hits.local),
)
