"""What a router counts, as OpenTelemetry instruments with a Prometheus page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import REGISTRY, generate_latest

from services.router.dispatch.active_request import ActiveRequest
from services.router.placement.disaggregation import Route
from services.router.request import Request, RequestSummary
from shared.errors import TandemError
from shared.telemetry.observable_counter import ObservableCounter

OTHER_TENANTS = "other"

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


@dataclass(slots=True)
class TenantCounts:
    """One tenant's finished requests since start: its prompt tokens, and of these those that were not computed."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_local_tokens: int = 0
    """Found in the pool of the worker that computed the prompt."""
    num_peer_tokens: int = 0
    """Fetched from other workers' pools."""
    num_store_tokens: int = 0
    """Fetched from store nodes."""


class RouterMetrics:
    """Names follow the GenAI semantic conventions where they exist, `tandem_*` otherwise."""

    def __init__(self, model_name: str, tenants: Iterable[str] = ()) -> None:
        """Tenants that are not among `tenants` are counted together, as `OTHER_TENANTS`: names come from clients, and
        a label's values must not be theirs to multiply."""
        self.counts = RouterCounts()
        self.tenants = {tenant: TenantCounts() for tenant in (*tenants, OTHER_TENANTS)}
        """By tenant."""
        self._model = {"gen_ai.response.model": model_name}
        view = View(
            instrument_name="gen_ai.server.time_to_first_token",
            aggregation=ExplicitBucketHistogramAggregation(_TTFT_BUCKETS),
        )
        self._provider = MeterProvider(metric_readers=[PrometheusMetricReader()], views=[view])
        meter = self._provider.get_meter("tandem.router")
        self._ttft = meter.create_histogram("gen_ai.server.time_to_first_token", unit="s")

        def counter(name: str, description: str, *labels: str) -> ObservableCounter:
            return ObservableCounter(meter, name, description, labels, self._model)

        self._requests = counter("tandem_requests", "requests by outcome", "outcome")
        self._retries = counter("tandem_retries", "requests placed anew, by cause", "cause")
        self._placements = counter("tandem_placements", "choices of workers by route", "route")
        self._refusals = counter("tandem_refusals", "requests refused, at arrival or after a wait", "when")
        self._prefixes = counter(
            "tandem_prefix_tokens", "prompt tokens by tenant and by where their KV came from", "tenant", "place"
        )
        self._tokens = counter("tandem_tokens", "tokens by kind", "kind")

    def finished(self, active: ActiveRequest) -> None:
        """A request ended well."""
        counts, num_prompt_tokens = self.counts, active.request.num_prompt_tokens
        counts.num_finished += 1
        counts.num_prompt_tokens += num_prompt_tokens
        counts.num_cached_tokens += active.summary.num_cached_tokens
        self._ttft.record(active.summary.ttft.ttft_ms / 1e3, self._model)
        self._requests.add(1, "finished")
        for kind, count in (
            ("prompt", num_prompt_tokens),
            ("cached", active.summary.num_cached_tokens),
            ("fetched", active.summary.num_fetched_tokens),
            ("fetched_from_peers", active.summary.num_peer_tokens),
            ("output", len(active.produced)),
        ):
            self._tokens.add(count, kind)
        self._count_prefix(active.request, active.summary)

    def _count_prefix(self, request: Request, summary: RequestSummary) -> None:
        """Prompt tokens that the fleet did not have to compute, by tenant."""
        tenant = request.tenant if request.tenant in self.tenants else OTHER_TENANTS
        store = summary.num_fetched_tokens - summary.num_peer_tokens
        local = summary.num_cached_tokens - summary.num_fetched_tokens
        counts = self.tenants[tenant]
        counts.num_requests += 1
        counts.num_prompt_tokens += request.num_prompt_tokens
        counts.num_local_tokens += local
        counts.num_peer_tokens += summary.num_peer_tokens
        counts.num_store_tokens += store
        computed = request.num_prompt_tokens - summary.num_cached_tokens
        places = {"local": local, "peer": summary.num_peer_tokens, "store": store, "computed": computed}
        for place, count in places.items():
            self._prefixes.add(max(0, count), tenant, place)

    def failed(self, error: TandemError) -> None:
        """A request ended with an error."""
        self.counts.num_failed += 1
        self._requests.add(1, error.code)

    def refused(self, *, waited: bool) -> None:
        """A request was refused as it came, or wrongly let in and refused after it had waited."""
        self._refusals.add(1, "waited" if waited else "arrival")

    def cancelled(self) -> None:
        """The client gave up, or a stop string ended the request at the edge."""
        self.counts.num_cancelled += 1
        self._requests.add(1, "cancelled")

    def retried(self, error: TandemError) -> None:
        """A request was placed anew."""
        self._retries.add(1, error.code)

    def placed(self, route: Route) -> None:
        """Workers were chosen: with a hand-off, or why without."""
        self._placements.add(1, route.value)

    def page(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(REGISTRY)

    def close(self) -> None:
        """Ends the collection."""
        self._provider.shutdown()
