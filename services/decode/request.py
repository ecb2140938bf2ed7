"""A request in the decode role, from Reserve to its last token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from services.decode.reservation import Arrival, Reservation
from services.worker.sessions.request import WorkerRequest
from shared.telemetry.tracing.span import Span


@dataclass(slots=True, kw_only=True)
class DecodeRequest(WorkerRequest):
    """State of one request in the decode role."""

    prefill_here: bool
    queued_at: float = field(default_factory=time.perf_counter)
    reservation: Reservation | None = None
    receiving: asyncio.Task[tuple[Arrival | None, bool]] | None = None
    """Runs the reservation, until it ends."""
    first_token: int | None = None
    """Set when it joined."""
    joined_at: float = 0.0
    """When its decoding began: with the join, or with the first token where the prompt was computed here."""
    reported: bool = False
    """Its first tokens were sent."""
    reserved_at: float = 0.0
    reported_at: float = 0.0

    def end_trace(self, error: Exception | None = None) -> None:
        """Its last token has left, or it ended before."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        now = time.perf_counter()
        parts: list[Span] = []
        if self.prefill_here:
            parts = trace.prompt_parts(self.fetch, self.queued_at, self.scheduled_at, self.reported_at)
        elif self.reserved_at:
            parts = [
                trace.part("reserve", trace.began, self.reserved_at),
                trace.part("receive", self.reserved_at, self.joined_at or now),
            ]
        if self.joined_at and not self.prefill_here:
            parts.append(trace.part("join", self.joined_at, self.reported_at or now))
        if self.reported_at:
            parts.append(trace.part("stream", self.reported_at, now))
        trace.record("decode", {"tandem.request_id": self.request_id}, parts, error)
