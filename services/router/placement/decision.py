"""Placement decisions and their reasons, as `tandem explain` shows them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.router.placement.disaggregation import Route


class Candidate(NamedTuple):
    """One eligible worker; a tuple, because a decision in a large fleet makes 64 of them."""

    name: str
    score: float
    """Weighted mean of `parts`, in [0, 1]."""
    parts: tuple[tuple[str, float], ...]
    """(scorer, its score in [0, 1])."""
    num_queued_tokens: int
    num_free_blocks: int
    num_requests: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers for a request; `prefill` is None if the decode worker prefills."""

    decode: str
    prefill: str | None
    route: Route = field(default=Route.HAND_OFF, compare=False)
    predicted_ttft_s: float | None = field(default=None, compare=False)
    """Seconds from now to the first token; None before enough prompts were seen."""
    decodes: tuple[Candidate, ...] = field(default=(), compare=False)
    """The eligible decode workers considered, best first."""
    prefills: tuple[Candidate, ...] = field(default=(), compare=False)

    @property
    def summary(self) -> Choice:
        """The workers and the route alone, without the candidates."""
        return replace(self, predicted_ttft_s=None, decodes=(), prefills=())
