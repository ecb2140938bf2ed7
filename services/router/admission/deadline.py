"""Refuses requests that can no longer meet their TTFT deadline: an early 429 is worth more than a late answer."""

from __future__ import annotations

from services.router.placement.views import Pool
from shared.errors import Overloaded


def check_deadline(now_s: float, deadline_s: float, predicted_s: float | None, grace_s: float = 0.0) -> None:
    """Raises Overloaded if the first token, `predicted_s` from now, comes more than `grace_s` after `deadline_s`.

    Without a prediction nothing is refused. The retry hint is the time by which the request is late: after it, the
    same request would be in time if no other request came.
    """
    if predicted_s is None:
        return
    late_s = now_s + predicted_s - deadline_s
    if late_s > grace_s:
        raise Overloaded(
            f"the first token is predicted in {predicted_s:.3g} s, {late_s:.3g} s after its deadline",
            retry_after_s=max(1.0, late_s),
            field="ttft_deadline",
        )


def may_be_late(num_waiting: int, pool: Pool, idle_share: float) -> bool:
    """Whether a prompt that is too long to meet the target on any worker is served all the same.

    It is while the queue is empty and at least `idle_share` of the workers have nothing to prefill: then it delays
    no other request, and leaves a prefix that lets the conversation's next turn be in time. `idle_share` above 1:
    never.
    """
    if num_waiting:
        return False
    num_idle = sum(view.accepting and not view.num_queued_tokens for view in pool)
    return num_idle >= idle_share * max(1, len(pool))
