"""The router's metrics: their definitions, and the calls that update them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.router.dispatch.active_request import ActiveRequest
from services.router.placement.disaggregation import Route
from services.router.request import Request, RequestSummary
from shared.errors import TandemError, TransferFailed, WorkerLost
from shared.telemetry.metrics import Kind, Metric, Metrics, counter
from shared.telemetry.tracing.tracer import Tracer

OTHER_TENANTS = "other"

TTFT = Metric(
    Kind.HISTOGRAM,
    "gen_ai.server.time_to_first_token",
    "Time from a request's arrival at the router to its first token, finished requests only.",
    unit="s",
    # The GenAI semantic conventions' advised boundaries.
    buckets=(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TPOT = Metric(
    Kind.HISTOGRAM,
    "gen_ai.server.time_per_output_token",
    "Mean time between a finished request's tokens after the first, as the router received them.",
    unit="s",
    # The GenAI semantic conventions' advised boundaries.
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
REQUESTS = counter("tandem_requests_total", "Requests by outcome: finished, cancelled, or an error's code.", "outcome")
RETRIES = counter("tandem_retries_total", "Requests placed again, by the code of the error that caused it.", "cause")
PLACEMENTS = counter("tandem_placements_total", "Choices of workers: with a hand-off, or why without one.", "route")
REFUSALS = counter("tandem_refusals_total", "Requests refused by admission: at arrival, or after they waited.", "when")
PREFIX_TOKENS = counter(
    "tandem_prefix_tokens_total",
    "Prompt tokens of finished requests by tenant and by where their KV came from: local, peer, store, or computed.",
    "tenant",
    "place",
)
TOKENS = counter(
    "tandem_tokens_total", "Tokens of finished requests by kind; cached ones include fetched ones.", "kind"
)
PICKS = counter(
    "tandem_picks_total", "Requests of gateways by the endpoint picker's answer: picked, or an error's code.", "outcome"
)
METRICS = (TTFT, TPOT, REQUESTS, RETRIES, PLACEMENTS, REFUSALS, PREFIX_TOKENS, TOKENS, PICKS)
"""All metrics of a router; every sample also has the label gen_ai_response_model."""


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
    """One tenant's finished requests since start: prompt tokens, and by source those that were not computed."""

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

    def __init__(self, model_name: str, tenants: Iterable[str] = (), name: str = "") -> None:
        """`name` is the router's. Tenants that are not among `tenants` are counted together, as `OTHER_TENANTS`: names
        come from clients, who could otherwise add label values without limit."""
        self.counts = RouterCounts()
        self.tenants = {tenant: TenantCounts() for tenant in (*tenants, OTHER_TENANTS)}
        """By tenant."""
        self._model = {"gen_ai.response.model": model_name}
        self._metrics = metrics = Metrics("tandem-router", name, self._model)
        self._ttft = metrics.histogram(TTFT)
        self._tpot = metrics.histogram(TPOT)
        self._requests = metrics.counter(REQUESTS)
        self._retries = metrics.counter(RETRIES)
        self._placements = metrics.counter(PLACEMENTS)
        self._refusals = metrics.counter(REFUSALS)
        self._prefixes = metrics.counter(PREFIX_TOKENS)
        self._tokens = metrics.counter(TOKENS)
        self._picks = metrics.counter(PICKS)
        for known, values in (
            (self._requests, ("finished", "cancelled")),
            (self._placements, [route.value for route in Route]),
            (self._refusals, ("arrival", "waited")),
            (self._retries, (WorkerLost.code, TransferFailed.code)),
            (self._picks, ("picked",)),
        ):
            for value in values:
                known.add(0, value)  # a series that begins above 0 gives a wrong first rate

    def watch_loop(self) -> None:
        """See `Metrics`."""
        self._metrics.watch_loop()

    def observe_traces(self, tracer: Tracer) -> None:
        """Shows what became of the spans."""
        tracer.observe(self._metrics)

    def finished(self, active: ActiveRequest) -> None:
        """A request finished."""
        counts, num_prompt_tokens = self.counts, active.request.num_prompt_tokens
        counts.num_finished += 1
        counts.num_prompt_tokens += num_prompt_tokens
        counts.num_cached_tokens += active.summary.num_cached_tokens
        self._ttft.record(active.summary.ttft.ttft_ms / 1e3, self._model)
        num_further = len(active.produced) - active.num_resumed - 1
        if num_further > 0 and active.timeline.first_token:
            self._tpot.record((time.perf_counter() - active.timeline.first_token) / num_further, self._model)
        self._requests.add(1, "finished")
        for kind, count in (
            ("prompt", num_prompt_tokens),
            ("cached", active.summary.num_cached_tokens),
            ("fetched", active.summary.num_fetched_tokens),
            ("fetched_from_peers", active.summary.num_peer_tokens),
            ("output", len(active.produced) - active.num_resumed),
        ):
            self._tokens.add(count, kind)
        self._count_prefix(active.request, active.summary)

    def _count_prefix(self, request: Request, summary: RequestSummary) -> None:
        """Counts prompt tokens by tenant and by the source of their KV."""
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
        """A request was refused at arrival, or after it had waited in the queue."""
        self._refusals.add(1, "waited" if waited else "arrival")

    def cancelled(self) -> None:
        """The client closed the call, or a stop string ended the request at the edge."""
        self.counts.num_cancelled += 1
        self._requests.add(1, "cancelled")

    def retried(self, error: TandemError) -> None:
        """A request is placed again after an error."""
        self._retries.add(1, error.code)

    def placed(self, route: Route) -> None:
        """Workers were chosen: with a hand-off, or why without."""
        self._placements.add(1, route.value)

    def picked(self, outcome: str) -> None:
        """A gateway asked for an endpoint."""
        self._picks.add(1, outcome)

    @property
    def registry(self) -> CollectorRegistry:
        """What the page is made of."""
        return self._metrics.registry

    def page(self) -> bytes:
        """The Prometheus text format."""
        return self._metrics.page()

    def close(self) -> None:
        """Ends the collection."""
        self._metrics.close()
