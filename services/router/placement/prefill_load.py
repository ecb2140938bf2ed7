"""Scores a prefill worker by the tokens it must compute before this request has its first one."""

from __future__ import annotations

from services.router.placement.views import Need, WorkerView


def has_turn(view: WorkerView, need: Need, max_queued_tokens: int) -> bool:
    """Filter: an idle worker always; a busy one while its queue with this request stays within the limit."""
    uncached = need.num_tokens - view.num_hit_tokens
    return view.accepting and (view.num_queued_tokens == 0 or view.num_queued_tokens + uncached <= max_queued_tokens)


def prefill_load(view: WorkerView, need: Need, max_queued_tokens: int) -> float:
    """1 / (1 + (queued + uncached) / max_queued_tokens): load and prefix hits in one unit, tokens to compute."""
    tokens = view.num_queued_tokens + max(0, need.num_tokens - view.num_hit_tokens)
    return 1.0 / (1.0 + tokens / max_queued_tokens)
