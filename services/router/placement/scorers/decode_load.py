"""Scores a decode worker by its free capacity."""

from __future__ import annotations

from services.router.placement.scorers.scorer import Scorer, ScoringContext
from services.router.placement.views import WorkerView


def decode_load(view: WorkerView, context: ScoringContext) -> float:
    """The mean of two shares: blocks free after this request, and free batch slots."""
    missing = context.request.num_missing_blocks(view.name, context.least_hit)
    blocks = max(0, view.num_free_blocks - missing) / max(1, view.num_total_blocks)
    places = max(0, view.max_num_seqs - view.num_requests) / max(1, view.max_num_seqs)
    return min(1.0, (blocks + places) / 2)


SCORER = Scorer(
    setting="decode_load",
    name="load",
    stages=("decode", "collocated"),
    default_weight=1.0,
    doc="Decode worker: free blocks and batch slots.",
    score=decode_load,
)
