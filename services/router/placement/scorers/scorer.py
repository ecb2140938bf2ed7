"""What a scorer is: a worker's worth for one request, in [0, 1], with the name and default of its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.router.placement.views import PlacementRequest, WorkerView

Stage = Literal["prefill", "decode", "collocated"]
"""Which worker is chosen: of either pool, or the one that does both."""


@dataclass(frozen=True, slots=True)
class TierWeights:
    """Worth of a prompt token's KV by its place; local ≥ peer ≥ store."""

    local: float = 1.0
    peer: float = 0.5
    store: float = 0.25


@dataclass(frozen=True, slots=True)
class ScoringContext:
    """What scorers may look at beside the worker."""

    request: PlacementRequest
    least_hit: float = 0.0
    """Hits of fewer tokens count as none."""
    scale_tokens: int = 1
    """Queue length in tokens at which a load score is a half."""
    tiers: TierWeights = TierWeights()
    last: str = ""
    """The worker that served the session's last turn at this stage; empty = none."""
    near: tuple[str, ...] = ()
    """Label of the decode worker that was chosen; empty = unknown."""


def _always(_: ScoringContext) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Scorer:
    """One entry of the registry. A worker's score is the mean of its scorers' values, weighted by their weights."""

    setting: str
    """Name of its weight among the placement settings."""
    name: str
    """What `tandem explain` calls it."""
    stages: tuple[Stage, ...]
    """Where it is asked."""
    default_weight: float
    """0 = off unless it is set."""
    doc: str
    """Of the setting."""
    score: Callable[[WorkerView, ScoringContext], float]
    """In [0, 1]; pure."""
    applies: Callable[[ScoringContext], bool] = _always
    """False for a request that it cannot judge: it is left out of the mean."""
