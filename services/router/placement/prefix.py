"""Scores a worker by the share of the prompt that lies in its pool."""

from __future__ import annotations

from services.router.placement.views import Need, WorkerView


def prefix_hit(view: WorkerView, need: Need) -> float:
    """Hit tokens over all tokens."""
    return min(1.0, view.num_hit_tokens / max(1, need.num_tokens))
