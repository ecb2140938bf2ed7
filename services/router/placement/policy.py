"""Placement: first the decode worker, then a prefill worker; in collocated mode one worker does both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.router.placement.decode_load import can_hold, decode_load
from services.router.placement.prefill_load import has_turn, prefill_load
from services.router.placement.prefix import prefix_hit
from services.router.placement.views import Need, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Weights and limits."""

    max_queued_tokens: int = 2048
    """A prefill worker gets more work while it has fewer tokens than this to compute."""
    prefix_weight: float = 0.5
    """Of a decode worker's score, how much the prefix it holds counts against its load."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes; `prefill` is None where the decode worker prefills."""

    decode: str
    prefill: str | None


class Placement:
    """Chooses workers. Deterministic for a given seed and order of calls."""

    def __init__(self, config: PlacementConfig, seed: int = 0) -> None:
        self._config = config
        self._random = random.Random(seed)

    def choose(
        self, need: Need, decodes: Sequence[WorkerView], prefills: Sequence[WorkerView], *, collocated: bool
    ) -> Choice | None:
        """None where no worker can start the request now."""
        limit = self._config.max_queued_tokens
        holding = [view for view in decodes if can_hold(view, need)]
        if collocated:
            holding = [view for view in holding if has_turn(view, need, limit)]
            decode = self._pick(
                holding,
                lambda view: (decode_load(view, need) + prefill_load(view, need, limit)) / 2,
            )
            return Choice(decode.name, None) if decode else None
        weight = self._config.prefix_weight
        decode = self._pick(
            holding, lambda view: weight * prefix_hit(view, need) + (1 - weight) * decode_load(view, need)
        )
        prefill = self._pick(
            [view for view in prefills if has_turn(view, need, limit)],
            lambda view: prefill_load(view, need, limit),
        )
        return Choice(decode.name, prefill.name) if decode and prefill else None

    def _pick(self, views: Sequence[WorkerView], score: Callable[[WorkerView], float]) -> WorkerView | None:
        """The best score; equals are drawn, so that several routers do not all take the first."""
        if not views:
            return None
        scores = [score(view) for view in views]
        best = max(scores)
        return self._random.choice([view for view, value in zip(views, scores, strict=True) if value == best])
