"""A process's spans: exported, kept for a while, or dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shared.telemetry.metrics import Metrics, Observed, counter, gauge
from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.settings import TracesSettings
from shared.telemetry.tracing.span import Attributes, Span

if TYPE_CHECKING:
    from shared.telemetry.tracing.exporter import SpanExporter

MAX_KEPT_SPANS = 16_384
"""About 8 MiB. The oldest traces go first."""
MAX_WORDS = 1024
"""Most decisions on traces whose spans are still to come: a decision may overtake a span that ends later than its
request."""


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


class Tracer:
    """Implements `SpanSink`: sampled spans go to the exporter at once, the others wait for the router's word.
    `close()` sends what waits to be exported and is idempotent."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Owns the exporter."""
        self._exporter = exporter
        self.kept = KeptSpans()

    @classmethod
    def of(cls, settings: TracesSettings, service: str, instance: str) -> Tracer | None:
        """None where the settings name no collector: then nothing is recorded. Raises ConfigError."""
        if not settings.endpoint:
            return None
        from opentelemetry.sdk.resources import Resource

        from shared.telemetry.tracing.exporter import SpanExporter  # and what it sends with
        from shared.telemetry.tracing.otlp_connection import collector_of

        own = {"service.name": service, "service.instance.id": instance}
        resource = Resource.create(own).attributes  # with those of OTEL_RESOURCE_ATTRIBUTES
        return cls(SpanExporter(collector_of(settings), _plain(resource)))

    def start(self) -> None:
        """Begins to export; on the event loop."""
        self._exporter.start()

    async def close(self) -> None:
        """See the class."""
        await self._exporter.close()

    def record(self, context: TraceContext, spans: Sequence[Span]) -> None:
        """See `SpanSink`."""
        if context.sampled or self.kept.put(context.trace_id, spans):
            self._exporter.add(context.trace_id, spans)

    def export(self, trace_id: int, num_spans: int, build: Callable[[], Sequence[Span]]) -> None:
        """Exports spans, whether the trace is sampled or not; see `SpanExporter.add_later`."""
        self._exporter.add_later(trace_id, num_spans, build)

    def release(self, trace_ids: Iterable[bytes]) -> None:
        """See `SpanSink`."""
        for name in trace_ids:
            trace_id = int.from_bytes(name, "big")
            if spans := self.kept.release(trace_id):
                self._exporter.add(trace_id, spans)

    def observe(self, metrics: Metrics) -> None:
        """Shows what became of the spans on the process's metrics page."""
        metrics.observe(METRICS, self)

    @property
    def num_exported(self) -> int:
        """Spans that the collector took."""
        return self._exporter.counters.num_exported

    @property
    def num_dropped(self) -> Mapping[str, float]:
        """Spans that were to be exported and were not, by reason."""
        counters = self._exporter.counters
        return {"queue_full": counters.num_dropped_full, "collector": counters.num_dropped_refused}


METRICS: tuple[Observed[Tracer], ...] = (
    Observed(
        counter("tandem_trace_spans_exported_total", "Spans that the OpenTelemetry collector took."),
        lambda tracer: tracer.num_exported,
    ),
    Observed(
        counter(
            "tandem_trace_spans_dropped_total",
            "Spans that were not exported: too many waited (queue_full), or the collector did not take them.",
            "reason",
        ),
        lambda tracer: tracer.num_dropped,
    ),
    Observed(
        gauge("tandem_trace_spans_kept", "Spans of requests that were not sampled, kept in case they turn out slow."),
        lambda tracer: tracer.kept.num_spans,
    ),
)
"""Metrics of a process that has a collector."""


def _plain(attributes: Mapping[str, object]) -> Attributes:
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in attributes.items()}
