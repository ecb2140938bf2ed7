"""Scores a worker by the tokens that it must compute before this request has its first one."""

from __future__ import annotations

from services.router.placement.views import PlacementRequest, WorkerView

GUEST_AFTER_S = 0.5
"""A worker that another router owns is as good as one's own when no other's prompt was seen there for so long: longer
than any report is old. Sooner, all routers would hear of an idle one in the same moment, and all give it a prompt."""


def has_turn(view: WorkerView, need: PlacementRequest, max_queued_tokens: int, patience: float = 1.0) -> bool:
    """Filter: an idle worker always, a busy one while queued < `max_queued_tokens` + `patience` · hit tokens.

    A worker that holds some of the prompt may have a longer queue. With a patience of 1, by just the tokens that need
    not be computed: the client waits no longer than for a computation elsewhere. With more, clients wait so that the
    fleet computes less; the TTFT target bounds by how much.

    Another router's worker, while others have had prompts there in the last GUEST_AFTER_S, is taken for a prompt alone
    of which it holds much: queued < `patience` · hit tokens − `max_queued_tokens`.
    """
    if not view.accepting:
        return False
    queued, worth = view.num_queued_tokens, patience * need.hits.local.get(view.name, 0)
    if view.in_shard or need.now_s - view.ours_since_s >= GUEST_AFTER_S:
        return queued == 0 or queued < max_queued_tokens + worth
    return queued < worth - max_queued_tokens


def prefill_load(view: WorkerView, need: PlacementRequest, scale_tokens: int, least_hit: float = 0.0) -> float:
    """1 / (1 + (queued + uncached) / scale): load and prefix hits in one unit, tokens to compute.

    `scale_tokens` is where the score is a half; the policy takes the longer of the prompt and its queue limit. Hits of
    fewer tokens than `least_hit` count as none.
    """
    num_uncached = need.num_uncached_tokens(view.name, least_hit)
    return 1.0 / (1.0 + (view.num_queued_tokens + num_uncached) / scale_tokens)
