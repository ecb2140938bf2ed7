"""Records of requests that have ended, written down."""

from __future__ import annotations

from services.router.dispatch.record import FINISHED, Ask, Failure, RequestEvent, RequestRecord, RequestState
from services.router.placement.decision import Choice
from services.router.views.attribution.verdict import Outcome

_ENDS = {
    Outcome.FINISHED: (RequestEvent.FINISH, RequestState.FINISHED, None),
    Outcome.CUT: (RequestEvent.CANCEL, RequestState.CANCELLED, None),
    Outcome.REFUSED: (RequestEvent.FAIL, RequestState.FAILED, Failure("overloaded", "full", 429)),
    Outcome.FAILED: (RequestEvent.FAIL, RequestState.FAILED, Failure("worker_lost", "gone", 503)),
}


def ended(
    outcome: Outcome = Outcome.FINISHED,
    *,
    request_id: str = "r",
    ttft_ms: float | None = 100.0,
    placement_ms: float = 0.0,
    queue_ms: float = 0.0,
    reserve_ms: float = 0.0,
    ship_exposed_ms: float = 0.0,
    ended_s: float = 100.2,
    delivered_at: float = 100.2,
    ttft_target_s: float = 0.0,
    state: RequestState = RequestState.DECODING,
    error: Failure | None = None,
    num_attempts: int = 1,
    num_output_tokens: int = 11,
    prefill_compute_ms: float = 100.0,
    decode_ms: float = 100.0,
    **fields: object,
) -> RequestRecord:
    """A request that arrived at 100 s: 100 ms to its first token, then 10 ms a token for 11 tokens. `ttft_ms` None:
    it ended in `state` without a token."""
    record = RequestRecord(Ask(request_id, "t", 100.0, 8, ttft_timeout_s=ttft_target_s))
    record.choices = [Choice("d", "p")] * num_attempts
    matched = 100.0 + placement_ms / 1e3
    placed = matched + queue_ms / 1e3
    record.add(RequestEvent.MATCHED, RequestState.QUEUED, at=matched)
    record.add(RequestEvent.PLACED, RequestState.RESERVED, at=placed)
    record.add(RequestEvent.SUBMITTED, RequestState.PREFILLING, at=placed + reserve_ms / 1e3)
    if ttft_ms is None:
        record.add(RequestEvent.SUBMITTED, state, at=placed)
    else:
        first = 100.0 + ttft_ms / 1e3
        record.add(RequestEvent.FIRST_TOKEN, RequestState.SHIPPING, at=first)
        record.add(RequestEvent.JOINED, RequestState.DECODING, at=first + ship_exposed_ms / 1e3)
    event, end, failure = _ENDS[outcome]
    record.add(event, end, at=ended_s, error=error or failure)
    record.num_output_tokens, record.prefill_compute_ms, record.decode_ms = (
        num_output_tokens, prefill_compute_ms, decode_ms,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(record, name, value)
    if delivered_at:
        record.close(FINISHED if outcome is Outcome.FINISHED else "cancelled", None, num_output_tokens)
        record.delivered_at = delivered_at
    return record
