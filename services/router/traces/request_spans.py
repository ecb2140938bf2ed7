"""A request's notes as spans."""

from __future__ import annotations

from services.router.dispatch.states import TRANSITIONS, RequestEvent, RequestState
from services.router.traces.notes import AttemptNote, Look, Mark
from shared.errors import TandemError
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Span, SpanKind, Value

_NAMES = {
    RequestState.RESERVED: "reserve",
    RequestState.PREFILLING: "prefill",
    RequestState.SHIPPING: "ship",
    RequestState.RESUMING: "resume",
    RequestState.DECODING: "decode",
}
_ASKING = (RequestState.RESERVED, RequestState.PREFILLING)
_FAILURES = (RequestEvent.RETRY, RequestEvent.SENDER_LOST, RequestEvent.FAIL)


class RequestSpans:
    """Turns one request's notes into spans."""

    def __init__(self, context: TraceContext, request_id: str, last_error: BaseException | None) -> None:
        self._root_id = context.span_id
        self._request_id = request_id
        self._last_error = last_error
        self._spans: list[Span] = []

    def build(
        self, began: float, marks: list[Mark], looks: list[Look], attempts: list[AttemptNote], now: float
    ) -> list[Span]:
        """In the order in which they ended, but for the attempts'."""
        state, since, present, worker = RequestState.QUEUED, began, 0, ""
        waiting, open_attempts = iter(looks), iter(attempts)
        attempt: Span | None = None
        lost_id = 0  # the span of the lost prefill worker that the next one takes over from
        for event, at, error, span_id, asked in marks:
            failure = (
                (error or (self._last_error if event is RequestEvent.FAIL else None)) if event in _FAILURES else None
            )
            if state is RequestState.QUEUED:
                placed = next(open_attempts, None) if event is RequestEvent.PLACED else None
                self._add_waiting(since, at, next(waiting, None), placed, failure, is_retry=attempt is not None)
                if placed is not None:
                    attempt = self._new_attempt(placed, at, attempt)
            elif state in _NAMES:
                assert attempt is not None
                span = self._add(_NAMES[state], present or new_span_id(), attempt.span_id, since, at, failure)
                span.kind = SpanKind.CLIENT if state in _ASKING else SpanKind.INTERNAL
                if worker:
                    span.attributes = {**span.attributes, "tandem.worker": worker}
                if lost_id and state in (RequestState.PREFILLING, RequestState.SHIPPING):
                    span.links, lost_id = (lost_id,), 0
                if event is RequestEvent.SENDER_LOST:
                    lost_id = span.span_id
            following = TRANSITIONS[state].get(event, state)
            if attempt is not None and state in _NAMES and following not in _NAMES:
                self._close(attempt, at, failure)
            state, since, present, worker = following, at, span_id, asked
        if not state.ended:  # the client is answered, and the core has not heard of it yet
            if attempt is not None and state in _NAMES:
                self._add(_NAMES[state], present or new_span_id(), attempt.span_id, since, now, None)
                self._close(attempt, now, None)
            elif state is RequestState.QUEUED:
                self._add_waiting(since, now, next(waiting, None), None, self._last_error, is_retry=attempt is not None)
        return self._spans

    def _add_waiting(
        self,
        since: float,
        until: float,
        look: Look | None,
        placed: AttemptNote | None,
        failure: BaseException | None,
        *,
        is_retry: bool,
    ) -> None:
        """The index's answer, the queue, the choice of workers; before a retry, what was learned of a death."""
        if look is not None:
            if is_retry:
                self._add("pause", new_span_id(), self._root_id, since, look.began, None)
                since = look.began
            ended = min(look.ended or until, until)  # an answer may have come since
            self._add("match", look.span_id, self._root_id, since, ended, None).kind = SpanKind.CLIENT
            since = ended
        chosen_from = min(max(since, placed.placing_at), until) if placed is not None else until
        self._add("queue", new_span_id(), self._root_id, since, chosen_from, failure)
        if placed is not None:
            self._add("placement", new_span_id(), self._root_id, chosen_from, until, None).attributes = {
                "tandem.route": placed.route
            }

    def _new_attempt(self, placed: AttemptNote, at: float, before: Span | None) -> Span:
        prefill = placed.prefill.name if placed.prefill is not None else ""
        attributes: dict[str, Value] = {
            "tandem.request_id": self._request_id,
            "tandem.decode_worker": placed.decode.name,
            **({"tandem.prefill_worker": prefill} if prefill else {}),
        }
        span = Span("attempt", placed.span_id, self._root_id, at, at, attributes=attributes)
        if before is not None:
            span.links = (before.span_id,)
        self._spans.append(span)
        return span

    def _close(self, attempt: Span, at: float, failure: BaseException | None) -> None:
        attempt.ended = at
        if failure is not None:
            attempt.error = str(failure)
            attempt.attributes = {**attempt.attributes, "error.type": _error_type(failure)}

    def _add(
        self, name: str, span_id: int, parent_id: int, began: float, ended: float, failure: BaseException | None
    ) -> Span:
        span = Span(name, span_id, parent_id, began, ended)
        if failure is not None:
            span.error = str(failure)
            span.attributes = {"error.type": _error_type(failure)}
        self._spans.append(span)
        return span


def _error_type(error: BaseException) -> str:
    return error.code if isinstance(error, TandemError) else type(error).__name__
