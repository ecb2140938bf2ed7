"""Filters: which workers can take a request at all. Scorers compare those that pass."""

from __future__ import annotations

from services.router.placement.views import PlacementRequest, WorkerView

GUEST_AFTER_S = 0.5
"""A worker of another router's shard is as good as one's own when no other router's prompt was seen there for
this long: longer than any report is old. Sooner, all routers would hear of an idle one at the same moment and all give
it a prompt."""


def can_hold(view: WorkerView, request: PlacementRequest) -> bool:
    """A place in the batch, and free blocks for what it does not hold yet plus one a running request."""
    return (
        view.accepting
        and view.num_requests < view.max_num_seqs
        and request.num_missing_blocks(view.name) + view.num_requests <= view.num_free_blocks
    )


def has_turn(view: WorkerView, request: PlacementRequest, max_queued_tokens: int, patience: float = 1.0) -> bool:
    """An idle worker always, a busy one while queued < `max_queued_tokens` + `patience` · hit tokens.

    A worker that holds some of the prompt may have a longer queue. With a patience of 1, by just the tokens that need
    not be computed: the client waits no longer than for a computation elsewhere. With more, clients wait so that the
    fleet computes less; the TTFT target bounds by how much.

    A worker of another router's shard, while other routers have had prompts there in the last GUEST_AFTER_S, is taken
    only for a prompt of which it holds much: queued < `patience` · hit tokens − `max_queued_tokens`.
    """
    if not view.accepting:
        return False
    queued, worth = view.num_queued_tokens, patience * request.num_hit_tokens(view.name)
    if view.in_shard or request.now_s - view.ours_since_s >= GUEST_AFTER_S:
        return queued == 0 or queued < max_queued_tokens + worth
    return queued < worth - max_queued_tokens
