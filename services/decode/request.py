"""A request on a decode worker, from Reserve to its last token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from services.decode.reservation import Arrival, Reservation
from services.worker.attempt_trace import AttemptTrace
from services.worker.blocks.prefix_fetch.fetch import Fetch
from services.worker.session import Session
from shared.engine.messages import FirstScheduled
from shared.rpc.pb.tandem.v1 import decode_pb2
from shared.telemetry.logs import RequestLog
from shared.telemetry.tracing.span import Span

DecodeSession = Session[decode_pb2.DecodeEvent]


@dataclass(slots=True)
class DecodeRequest:
    """What the worker knows of it. Times are time.perf_counter() seconds, 0 for what has not come."""

    session: DecodeSession
    request_id: str
    num_tokens: int
    prefill_here: bool
    log: RequestLog
    tenant: str = ""
    fetch: Fetch = field(default_factory=Fetch)
    queued_at: float = field(default_factory=time.perf_counter)
    reservation: Reservation | None = None
    receiving: asyncio.Task[tuple[Arrival | None, bool]] | None = None
    """Runs the reservation, until it ends."""
    first_token: int | None = None
    """Set when it joined."""
    joined_at: float = 0.0
    """When its decoding began: with the join, or with the first token where the prompt was computed here."""
    scheduled: FirstScheduled | None = None
    reported: bool = False
    """Its first tokens were sent."""
    trace: AttemptTrace | None = None
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
            scheduled_at = self.scheduled.at if self.scheduled is not None else 0.0
            parts = trace.prompt_parts(self.fetch, self.queued_at, scheduled_at, self.reported_at)
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
