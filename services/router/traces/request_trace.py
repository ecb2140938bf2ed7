"""One request's spans in the router: each state that it is in (`dispatch/states.py`) is a span, below its attempt's.

While the request runs, its events and their times are noted and nothing else; the spans are built where the trace is
exported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from services.router.dispatch.states import RequestEvent
from services.router.traces.notes import AttemptNote, Look, Mark, TracedWorker
from services.router.traces.request_spans import RequestSpans
from shared.engine.sampling_params import SamplingParams
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Span, Value

_UNKNOWN = (0, "")
"""Span id and worker of the state that the next event begins."""


class Timed(Protocol):
    """Its moments, time.perf_counter() seconds."""

    accepted: float
    first_token: float
    """0 where none came."""


class Asked(Protocol):
    """What the client asked for."""

    @property
    def request_id(self) -> str:
        """Its name."""
        ...

    @property
    def tenant(self) -> str:
        """Whose it is."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """As it was resolved."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Of the client's prompt."""
        ...


class Spared(Protocol):
    """What it cost so far."""

    num_cached_tokens: int
    """Prompt tokens whose KV was not recomputed."""


class TracedRequest(Protocol):
    """What a trace reads of the request in the core that it is about."""

    trace: RequestTrace | None
    """Taken away at the end."""

    @property
    def request(self) -> Asked:
        """What the client asked for."""
        ...

    @property
    def summary(self) -> Spared:
        """What it cost so far."""
        ...

    @property
    def timeline(self) -> Timed:
        """Its moments."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Of this call."""
        ...


class RequestTrace:
    """Notes of one request. For the event loop; no method blocks."""

    __slots__ = ("_active", "_attempts", "_context", "_looks", "_marks", "_next", "began", "error")

    def __init__(self, context: TraceContext, active: TracedRequest) -> None:
        """`context`: of the call's root span."""
        self.began = time.perf_counter()
        self.error: BaseException | None = None
        """Why the request's present state will end."""
        self._context = context
        self._active = active
        self._marks: list[Mark] = []
        self._looks: list[Look] = []
        self._attempts: list[AttemptNote] = []
        self._next = _UNKNOWN

    # --- while it runs

    def moved(self, event: RequestEvent) -> None:
        """The request took an event."""
        span_id, worker = self._next
        self._marks.append((event, time.perf_counter(), self.error, span_id, worker))
        self._next, self.error = _UNKNOWN, None

    def looking(self) -> str:
        """The index is asked. Returns the `traceparent` for it."""
        look = Look(new_span_id(), time.perf_counter())
        self._looks.append(look)
        return self._context.traceparent_under(look.span_id)

    def looked(self) -> None:
        """The index has answered, or not in time."""
        self._looks[-1].ended = time.perf_counter()

    def placed(self, placing_at: float, decode: TracedWorker, prefill: TracedWorker | None, route: str) -> None:
        """Workers were chosen, behind the event PLACED; the choice began at `placing_at`."""
        self._attempts.append(AttemptNote(new_span_id(), placing_at, decode, prefill, route))

    def reserving(self) -> str:
        """The `traceparent` for the decode worker."""
        return self._context.traceparent_under(self._attempts[-1].span_id)

    def submitting(self, prefill: TracedWorker) -> str:
        """The `traceparent` for a prefill worker; the event SUBMITTED follows."""
        self._attempts[-1].senders.append(prefill)
        span_id = new_span_id()
        self._next = (span_id, prefill.name)
        return self._context.traceparent_under(span_id)

    def close(self) -> None:
        """The call is over: nothing more is noted, and neither holds the other in memory."""
        self._active.trace = None

    # --- at its end

    @property
    def workers(self) -> Iterable[TracedWorker]:
        """All that may have spans of it."""
        for attempt in self._attempts:
            yield attempt.decode
            yield from attempt.senders

    @property
    def first_token_at(self) -> float:
        """time.perf_counter(); 0 where none came."""
        return self._active.timeline.first_token

    @property
    def num_input_tokens(self) -> int:
        """Of the prompt."""
        return self._active.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Of this call."""
        return self._active.num_output_tokens

    def is_slow(self, ttft_s: float, tpot_s: float, now: float) -> bool:
        """Whether the first token, or on average the others, took longer than that; 0 = no limit."""
        line = self._active.timeline
        if ttft_s and (line.first_token or now) - line.accepted > ttft_s:
            return True
        num_further, ended = self.num_output_tokens - 1, self._marks[-1][1] if self._marks else now
        return bool(tpot_s and line.first_token and num_further > 0) and (
            ended - line.first_token > tpot_s * num_further
        )

    def request_attributes(self) -> dict[str, Value]:
        """What the client asked for and what was spared, for the root span."""
        request, summary = self._active.request, self._active.summary
        sampling = request.sampling
        attributes: dict[str, Value] = {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.cache_read.input_tokens": summary.num_cached_tokens,
            "tandem.request_id": request.request_id,
            "tandem.tenant": request.tenant,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        return attributes

    @property
    def most_spans(self) -> int:
        """As many as it may have at most."""
        return 1 + len(self._marks) + 2 * len(self._looks) + 2 * len(self._attempts)

    def spans(self, now: float) -> list[Span]:
        """All its spans, some time after its end; what has not ended `now` ends then."""
        spans = RequestSpans(self._context, self._active.request.request_id, self.error)
        return spans.build(self.began, self._marks, self._looks, self._attempts, now)
