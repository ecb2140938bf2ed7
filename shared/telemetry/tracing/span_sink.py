"""Where finished spans go, for those who make them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.span import Span


class SpanSink(Protocol):
    """For one event loop."""

    def record(self, context: TraceContext, spans: Sequence[Span]) -> None:
        """Finished spans of the context's trace. Does not block."""

    def release(self, trace_ids: Iterable[bytes]) -> None:
        """These traces (16 bytes each) were not sampled, and are to be exported all the same."""
