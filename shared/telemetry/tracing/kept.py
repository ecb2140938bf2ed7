"""Spans of traces that were not sampled, kept for a while: the router's word decides at a request's end whether the
trace is exported all the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shared.telemetry.tracing.span import Span

MAX_KEPT_SPANS = 16_384
"""About 8 MiB. The oldest traces go first."""
MAX_WORDS = 1024
"""Of traces whose spans are still to come: the word may overtake a span that ends later than its request."""


class KeptSpans:
    """Spans by trace, bounded by their number."""

    def __init__(self, max_spans: int = MAX_KEPT_SPANS) -> None:
        self._max_spans = max_spans
        self._by_trace: OrderedDict[int, list[Span]] = OrderedDict()
        self._num_spans = 0
        self._released: OrderedDict[int, None] = OrderedDict()

    @property
    def num_spans(self) -> int:
        """Kept now."""
        return self._num_spans

    def put(self, trace_id: int, spans: Sequence[Span]) -> bool:
        """Keeps spans. True where the trace's word has come already: then they are to be exported, and not kept."""
        if trace_id in self._released:
            return True
        self._by_trace.setdefault(trace_id, []).extend(spans)
        self._num_spans += len(spans)
        while self._num_spans > self._max_spans:
            _, oldest = self._by_trace.popitem(last=False)
            self._num_spans -= len(oldest)
        return False

    def release(self, trace_id: int) -> Sequence[Span]:
        """The spans of a trace that is to be exported; those that still come are, too."""
        self._released[trace_id] = None
        if len(self._released) > MAX_WORDS:
            self._released.popitem(last=False)
        spans = self._by_trace.pop(trace_id, [])
        self._num_spans -= len(spans)
        return spans
