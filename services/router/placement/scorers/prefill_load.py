"""Scores a worker by the tokens that it must compute before this request's first token."""

from __future__ import annotations

from services.router.placement.scorers.scorer import Scorer, ScoringContext
from services.router.placement.views import WorkerView


def prefill_load(view: WorkerView, context: ScoringContext) -> float:
    """1 / (1 + (queued + uncached) / scale): load and prefix hits in one unit, tokens to compute."""
    num_uncached = context.request.num_uncached_tokens(view.name, context.least_hit)
    return 1.0 / (1.0 + (view.num_queued_tokens + num_uncached) / context.scale_tokens)


SCORER = Scorer(
    setting="prefill_load",
    name="queue",
    stages=("prefill", "collocated"),
    default_weight=1.0,
    doc="Prefill worker: few tokens to compute before the first token.",
    score=prefill_load,
)
