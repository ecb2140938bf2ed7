"""A request's record as spans: what lies between two entries is one, below its attempt's or its call's."""

from __future__ import annotations

from collections.abc import Iterator

from services.router.dispatch.record import Entry, Failure, RequestEvent, RequestRecord, RequestState
from services.router.placement.decision import Choice
from shared.telemetry.trace_context import new_span_id
from shared.telemetry.tracing.span import Span, SpanKind, Value

_QUEUED_NAMES = {
    RequestEvent.RETRY: "pause",
    RequestEvent.MATCHING: "match",
    RequestEvent.MATCHED: "queue",
    RequestEvent.CHOOSING: "placement",
}
_NAMES = {
    RequestState.RESERVED: "reserve",
    RequestState.PREFILLING: "prefill",
    RequestState.SHIPPING: "ship",
    RequestState.REASSIGNING: "reserve",
    RequestState.REASSIGNING_HELD: "reserve",
    RequestState.RESUMING: "resume",
    RequestState.RESUMING_HELD: "resume",
    RequestState.DECODING: "decode",
    RequestState.COPYING: "copy",
    RequestState.CLOSING_UP: "close up",
    RequestState.REPEATING: "repeat",
}
_ASKING = (
    RequestEvent.MATCHING,
    RequestEvent.PLACED,
    RequestEvent.SUBMITTED,
    RequestEvent.SENDER_LOST,
    RequestEvent.MOVE,
)
"""Begin spans in which another process is waited for."""
_TO_WORKER = (RequestEvent.SUBMITTED, RequestEvent.MOVE, RequestEvent.ASKED_ANEW, RequestEvent.SWITCHED)
"""Begin spans of the worker that they name."""
_TAKEN_OVER = ("prefill", "ship")
"""Spans that another prefill worker's may take over from."""
_WITHIN = (
    *(RequestEvent.WAITED, RequestEvent.FULL, RequestEvent.LATE, RequestEvent.TIMEOUT),
    *(RequestEvent.OVERTOOK, RequestEvent.HELD, RequestEvent.ALL_HEARD),
)
"""Entries within a span."""


def request_spans(record: RequestRecord, root_id: int, now: float) -> Iterator[Span]:
    """All its spans below the call's, in the order in which they began; what has not ended `now` ends then."""
    entries = [(i, entry) for i, entry in enumerate(record.entries) if entry.event not in _WITHIN]
    choices = iter(record.choices)
    choice: Choice | None = None
    attempt: Span | None = None
    lost_id = 0  # the span of the lost prefill worker that the next one takes over from
    accepted_at = 0.0
    for (i, entry), following in zip(entries, [*(entry for _, entry in entries[1:]), None], strict=True):
        if entry.state.ended:
            break
        if entry.event is RequestEvent.ACCEPTED and following is not None and not following.state.ended:
            accepted_at = entry.at  # the next span begins here
            continue
        if entry.event is RequestEvent.CHOOSING:
            choice = next(choices)
        elif entry.event is RequestEvent.PLACED:
            attempt = _attempt(record, i, root_id, choice, attempt)
            yield attempt
        is_below = entry.state in _NAMES and attempt is not None
        span = Span(
            _NAMES[entry.state] if is_below else _QUEUED_NAMES.get(entry.event, "queue"),
            new_span_id() if entry.event is RequestEvent.PLACED else record.span_id(i),
            attempt.span_id if is_below and attempt is not None else root_id,
            accepted_at or entry.at,
            following.at if following is not None else max(now, entry.at),
            SpanKind.CLIENT if entry.event in _ASKING else SpanKind.INTERNAL,
            _attributes(entry, choice),
        )
        accepted_at = 0.0
        failure = following.error if following is not None else None
        _fail(span, failure)
        if lost_id and span.name in _TAKEN_OVER:
            span.links, lost_id = (lost_id,), 0
        if following is not None and following.event is RequestEvent.SENDER_LOST and span.name in _TAKEN_OVER:
            lost_id = span.span_id
        if is_below and attempt is not None:
            attempt.ended = span.ended
            if following is not None and following.state not in _NAMES:
                _fail(attempt, failure)
        yield span


def _attempt(record: RequestRecord, index: int, root_id: int, choice: Choice | None, before: Span | None) -> Span:
    entry = record.entries[index]
    attributes: dict[str, Value] = {
        "tandem.request_id": record.ask.request_id,
        "tandem.decode_worker": entry.worker,
    }
    if choice is not None and choice.prefill is not None:
        attributes["tandem.prefill_worker"] = choice.prefill
    links = (before.span_id,) if before is not None else ()
    return Span("attempt", record.span_id(index), root_id, entry.at, entry.at, attributes=attributes, links=links)


def _attributes(entry: Entry, choice: Choice | None) -> dict[str, Value]:
    if entry.event in _TO_WORKER:
        return {"tandem.worker": entry.worker}
    if entry.event is RequestEvent.CHOOSING and choice is not None:
        return {"tandem.route": choice.route.value}
    return {}


def _fail(span: Span, failure: Failure | None) -> None:
    if failure is not None:
        span.error = failure.message
        span.attributes = {**span.attributes, "error.type": failure.code}
