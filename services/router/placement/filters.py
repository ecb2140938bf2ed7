"""Filters: which workers can take a request at all. Scorers compare those that pass."""

from __future__ import annotations

from services.router.placement.views import PlacementRequest, WorkerView

GUEST_AFTER_S = 0.5
"""A worker of another router's shard counts as one's own once no other router's prompt was seen there for this long,
which is longer than any report is old. If it were shorter, all routers would see the same idle worker at once and all
would use it. Seconds."""


def can_hold(view: WorkerView, request: PlacementRequest) -> bool:
    """A free batch slot, and free blocks for what it does not hold yet plus one for each running request."""
    return (
        view.accepting
        and view.num_requests < view.max_num_seqs
        and request.num_missing_blocks(view.name) + view.num_requests <= view.num_free_blocks
    )


def has_queue_room(view: WorkerView, request: PlacementRequest, max_queued_tokens: int, patience: float = 1.0) -> bool:
    """An idle worker always; a busy one while queued < `max_queued_tokens` + `patience` · hit tokens.

    A worker that holds part of the prompt may have a longer queue. With patience 1 the allowance is exactly the tokens
    that need no computing: the client waits no longer than for a computation elsewhere. With more, clients wait so that
    the fleet computes less; the TTFT target bounds the wait.

    A worker of another router's shard, if other routers had prompts there in the last GUEST_AFTER_S, is taken only for
    a prompt of which it holds much: queued < `patience` · hit tokens − `max_queued_tokens`.
    """
    if not view.accepting:
        return False
    queued, worth = view.num_queued_tokens, patience * request.num_hit_tokens(view.name)
    if view.in_shard or request.now_s - view.exclusive_since_s >= GUEST_AFTER_S:
        return queued == 0 or queued < max_queued_tokens + worth
    return queued < worth - max_queued_tokens
