"""Scores a worker by the part of the prompt that it need not compute, weighted by how far away its KV lies."""

from __future__ import annotations

from services.router.placement.scorers.scorer import Scorer, ScoringContext, TierWeights
from services.router.placement.views import WorkerView

_OWN_POOL = TierWeights(1.0, 0.0, 0.0)  # a decode worker fetches no prefix


def prefix_hit(view: WorkerView, context: ScoringContext, tiers: TierWeights) -> float:
    """(w_local · local + w_peer · (peer − local) + w_store · (store − max(local, peer))) / prompt tokens.

    Negative differences count as 0: a farther place counts only for tokens that nearer ones lack. Local hits of fewer
    tokens than the context's `least_hit` count as 0 too.
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
    doc="Prefill worker: needs to compute little of the prompt.",
    score=lambda view, context: prefix_hit(view, context, context.tiers),
    applies=lambda context: bool(context.request.hits.local or context.request.hits.store),
)
DECODE_SCORER = Scorer(
    setting="decode_prefix",
    name="prefix",
    stages=("decode", "collocated"),
    default_weight=1.0,
    doc="Decode worker: holds much of the prompt, which need not be transferred.",
    score=lambda view, context: prefix_hit(view, context, _OWN_POOL),
    applies=lambda context: bool(context.request.hits.local),
)
