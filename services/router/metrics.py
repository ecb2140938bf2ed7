"""What a router counts, as OpenTelemetry instruments with a Prometheus page."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import REGISTRY, generate_latest

from services.router.active_request import ActiveRequest
from services.router.placement.disaggregation import Route
from shared.errors import TandemError

# The GenAI semantic conventions' advised boundaries, seconds.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


@dataclass(slots=True)
class RouterCounts:
    """Sums since start, for the status page."""

    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class RouterMetrics:
    """Names follow the GenAI semantic conventions where they exist, `tandem_*` otherwise."""

    def __init__(self, model_name: str) -> None:
        self.counts = RouterCounts()
        self._model = {"gen_ai.response.model": model_name}
        view = View(
            instrument_name="gen_ai.server.time_to_first_token",
            aggregation=ExplicitBucketHistogramAggregation(_TTFT_BUCKETS),
        )
        self._provider = MeterProvider(metric_readers=[PrometheusMetricReader()], views=[view])
        meter = self._provider.get_meter("tandem.router")
        self._ttft = meter.create_histogram("gen_ai.server.time_to_first_token", unit="s")
        self._requests = meter.create_counter("tandem_requests", description="requests by outcome")
        self._retries = meter.create_counter("tandem_retries", description="requests placed anew, by cause")
        self._placements = meter.create_counter("tandem_placements", description="choices of workers by route")
        self._tokens = meter.create_counter("tandem_tokens", description="tokens by kind")

    def finished(self, active: ActiveRequest) -> None:
        """A request ended well."""
        counts, num_prompt_tokens = self.counts, active.request.num_prompt_tokens
        counts.num_finished += 1
        counts.num_prompt_tokens += num_prompt_tokens
        counts.num_cached_tokens += active.summary.num_cached_tokens
        self._ttft.record(active.summary.ttft.ttft_ms / 1e3, self._model)
        self._requests.add(1, {**self._model, "outcome": "finished"})
        for kind, count in (
            ("prompt", num_prompt_tokens),
            ("cached", active.summary.num_cached_tokens),
            ("fetched", active.summary.num_fetched_tokens),
            ("output", len(active.produced)),
        ):
            self._tokens.add(count, {**self._model, "kind": kind})

    def failed(self, error: TandemError) -> None:
        """A request ended with an error."""
        self.counts.num_failed += 1
        self._requests.add(1, {**self._model, "outcome": error.code})

    def cancelled(self) -> None:
        """The client gave up, or a stop string ended the request at the edge."""
        self.counts.num_cancelled += 1
        self._requests.add(1, {**self._model, "outcome": "cancelled"})

    def retried(self, error: TandemError) -> None:
        """A request was placed anew."""
        self._retries.add(1, {**self._model, "cause": error.code})

    def placed(self, route: Route) -> None:
        """Workers were chosen: with a hand-off, or why without."""
        self._placements.add(1, {**self._model, "route": route.value})

    def page(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(REGISTRY)

    def close(self) -> None:
        """Ends the collection."""
        self._provider.shutdown()
