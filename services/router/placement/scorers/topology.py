"""Scores a prefill worker by its distance to the chosen decode worker, which receives the blocks."""

from __future__ import annotations

from services.router.placement.scorers.scorer import Scorer, ScoringContext
from services.router.placement.views import WorkerView


def nearness(view: WorkerView, context: ScoringContext) -> float:
    """Leading parts that both labels share, over the parts of the longer one; 0 if one is unknown.

    With labels zone/rack/domain, the same zone gives 1/3, the same rack 2/3, the same NVLink domain 1.
    """
    longest = max(len(view.label), len(context.near))
    if not longest:
        return 0.0
    shared = 0
    for mine, other in zip(view.label, context.near, strict=False):
        if mine != other:
            break
        shared += 1
    return shared / longest


SCORER = Scorer(
    setting="topology",
    name="topology",
    stages=("prefill",),
    default_weight=0.1,
    doc="Prefill worker: near the decode worker, by the workers' labels.",
    score=nearness,
    applies=lambda context: bool(context.near),
)
