"""What attribution is told of a request at its end."""

from __future__ import annotations

import time

from services.router.attribution.causes import Cause
from services.router.attribution.ended import Ended, Outcome
from services.router.dispatch.active_request import ActiveRequest
from services.router.request import Request, RequestSummary
from shared.errors import Overloaded, TandemError


def ended_request(active: ActiveRequest, error: BaseException | None, held_by: Cause | None) -> Ended | None:
    """None for a request that says nothing of the cluster: refused for what it asks, or going on on another call.

    `error`: None where it finished or was cancelled. `held_by`: what the queue's head waits for now.
    """
    outcome = Outcome.FINISHED if active.finished else Outcome.CUT
    if not active.finished and error is not None:
        if isinstance(error, TandemError) and error.http_status < 500 and not isinstance(error, Overloaded):
            return None
        outcome = Outcome.REFUSED if isinstance(error, Overloaded) else Outcome.FAILED
    if active.taken_over and not active.finished:
        return None
    request = active.request
    waits = active.waits
    if outcome is Outcome.REFUSED and not waits and held_by is not None:
        waits = {held_by: time.perf_counter() - active.timeline.accepted}
    return Ended(
        request.request_id,
        request.tenant,
        outcome,
        arrived_s=active.timeline.accepted,
        ended_s=time.perf_counter(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=active.num_output_tokens,
        summary=active.summary,
        first_token_s=active.timeline.first_token,
        ttft_target_s=request.ttft_timeout_s,
        waits=waits,
        num_attempts=max(1, active.num_attempts),
        num_failures=active.num_failures_in_all,
        state=active.state.value,
        error=getattr(error, "code", "") if error is not None else "",
    )


def refused_request(request: Request, error: Overloaded, held_by: Cause | None) -> Ended:
    """One that a full queue did not take."""
    now = time.perf_counter()
    arrived_s = request.arrived_at or now
    return Ended(
        request.request_id,
        request.tenant,
        Outcome.REFUSED,
        arrived_s,
        ended_s=now,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=0,
        summary=RequestSummary(),
        waits={held_by: max(now - arrived_s, 1e-9)} if held_by is not None else {},
        state="queued",
        error=error.code,
    )
