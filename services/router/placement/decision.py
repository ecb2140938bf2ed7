"""Placement decisions and their reasons, as `tandem explain` shows them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Decision:
    """One attempt's choice, with its context."""

    request_id: str
    attempt: int
    num_prompt_tokens: int
    queue_s: float
    """Time in the admission queue."""
    choice: Choice


class DecisionLog:
    """The newest decisions by request, bounded."""

    def __init__(self, limit: int) -> None:
        """Keeps the decisions of `limit` requests; 0 keeps none."""
        self._limit = limit
        self._decisions: OrderedDict[str, list[Decision]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def note(self, decision: Decision) -> None:
        """Adds an attempt's decision; forgets the request that was placed longest ago."""
        if not self._limit:
            return
        attempts = self._decisions.pop(decision.request_id, [])
        if decision.attempt == 1:
            attempts = []  # the id is used again
        self._decisions[decision.request_id] = [*attempts, decision]
        if len(self._decisions) > self._limit:
            self._decisions.popitem(last=False)

    def of(self, request_id: str) -> list[Decision]:
        """All attempts of a request in order; empty if it is unknown or forgotten."""
        return list(self._decisions.get(request_id, ()))
