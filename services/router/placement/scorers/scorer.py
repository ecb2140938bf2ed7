"""A scorer rates a worker for one request, in [0, 1]; it has a name and a default weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.router.placement.views import PlacementRequest, WorkerView

Stage = Literal["prefill", "decode", "collocated"]
"""Which worker is being chosen: prefill, decode, or collocated."""


@dataclass(frozen=True, slots=True)
class TierWeights:
    """Value of a prompt token's KV by its location; local ≥ peer ≥ store."""

    local: float = 1.0
    peer: float = 0.5
    store: float = 0.25


@dataclass(frozen=True, slots=True)
class ScoringContext:
    """A scorer's input besides the worker."""

    request: PlacementRequest
    least_hit: float = 0.0
    """Hits of fewer tokens count as none."""
    scale_tokens: int = 1
    """Queue length in tokens at which a load score is 0.5."""
    tiers: TierWeights = TierWeights()
    last: str = ""
    """The worker that served the session's last turn at this stage; empty = none."""
    near: tuple[str, ...] = ()
    """Label of the chosen decode worker; empty = unknown."""


def _always(_: ScoringContext) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Scorer:
    """One entry of the registry. A worker's score is the weighted mean of the scorers' values."""

    setting: str
    """Name of its weight among the placement settings."""
    name: str
    """Its name in `tandem explain`."""
    stages: tuple[Stage, ...]
    """The stages at which it is used."""
    default_weight: float
    """0 = off by default."""
    doc: str
    """Documentation of the setting."""
    score: Callable[[WorkerView, ScoringContext], float]
    """In [0, 1]; pure."""
    applies: Callable[[ScoringContext], bool] = _always
    """False for a request that it cannot rate: then it is left out of the mean."""
