"""The router's metrics: the calls that update them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.router.dispatch.record import FINISHED, Entry, RequestEvent, RequestRecord
from services.router.placement.decision import Route
from services.router.placement.moves import MoveCause
from services.router.views.metric_definitions import (
    DURATION,
    EXPOSED,
    FINISHED_REQUESTS,
    LOST_TOKENS,
    MIGRATIONS,
    MOVES,
    OUTPUT_LEN,
    PICKS,
    PLACEMENTS,
    PREFIX_TOKENS,
    PROMPT_LEN,
    QUEUE,
    REFUSALS,
    REQUESTS,
    RETRIES,
    TENANT_REQUESTS,
    TOKENS,
    TPOT,
    TTFT,
    TTFT_SECONDS,
)
from services.router.views.moves import MoveOutcome, move_outcome
from services.router.views.timings import TTFT_PARTS, tpot_s, ttft_split
from shared.engine.finish_reason import FinishReason
from shared.errors import Cancelled, Overloaded, TransferFailed, WorkerLost
from shared.telemetry.metrics import Metrics

OTHER_TENANTS = "other"
MAX_TENANTS = 100
"""As many configured tenants have series of their own, the first by name; a metrics page has to stay small."""

_REFUSALS = (RequestEvent.FULL, RequestEvent.LATE, RequestEvent.TIMEOUT)
_MOVED = (RequestEvent.SWITCHED, RequestEvent.LEFT_ALONE, RequestEvent.STAYED, RequestEvent.FAIL, RequestEvent.CANCEL)
"""May decide a move, as RETRY may."""
COUNTED = frozenset((RequestEvent.PLACED, RequestEvent.SENDER_LOST, RequestEvent.RETRY, *_MOVED, *_REFUSALS))
"""The events that `RouterMetrics.noted` counts; it does nothing for others."""
_PARTS = [(part,) for part in TTFT_PARTS]
_KINDS = [(kind,) for kind in ("prompt", "cached", "fetched", "fetched_from_peers", "output")]
_PLACES = ("local", "peer", "store", "computed")
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "cancelled"}


@dataclass(slots=True)
class RouterCounts:
    """Sums since start, for the status page."""

    num_finished: int = 0
    num_failed: int = 0
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
        known_tenants = sorted(set(tenants))
        self.tenants = {tenant: TenantCounts() for tenant in (*known_tenants, OTHER_TENANTS)}
        """By tenant."""
        self._named = frozenset(known_tenants[:MAX_TENANTS])
        self._places = {name: [(name, place) for place in _PLACES] for name in (*self._named, OTHER_TENANTS)}
        self.metrics = metrics = Metrics("tandem-router", name, {"gen_ai_response_model": model_name})
        """For what others count."""
        self.ttft, self.tpot = metrics.histogram(TTFT), metrics.histogram(TPOT)
        self.duration, self.queue = metrics.histogram(DURATION), metrics.histogram(QUEUE)
        self._exposed = metrics.histogram(EXPOSED)
        self.prompt_len, self.output_len = metrics.histogram(PROMPT_LEN), metrics.histogram(OUTPUT_LEN)
        self.requests = metrics.counter(REQUESTS)
        self.finished_requests = metrics.counter(FINISHED_REQUESTS)
        self._tenant_requests = metrics.counter(TENANT_REQUESTS)
        self._retries = metrics.counter(RETRIES)
        self._migrations = metrics.counter(MIGRATIONS)
        self._moves = metrics.counter(MOVES)
        self._placements = metrics.counter(PLACEMENTS)
        self._refusals = metrics.counter(REFUSALS)
        self._ttft_parts = metrics.counter(TTFT_SECONDS)
        self._prefixes = metrics.counter(PREFIX_TOKENS)
        self.tokens = metrics.counter(TOKENS)
        self._lost_tokens = metrics.counter(LOST_TOKENS)
        self._picks = metrics.counter(PICKS)
        for known, values in (
            (self.requests, (FINISHED, Cancelled.code)),
            (self.finished_requests, ("stop", "length")),
            (self._placements, [route.value for route in Route]),
            (self._retries, (WorkerLost.code, TransferFailed.code)),
            (self._picks, ("picked",)),
        ):
            for value in values:
                known.add(0, value)  # a series that begins above 0 gives a wrong first rate
        for when, cause in (("arrival", "full"), ("arrival", "late"), ("waited", "late"), ("waited", "timeout")):
            self._refusals.add(0, when, cause)
        for why in MoveCause:
            self._moves.add(0, MoveOutcome.MOVED.value, why.value)
        for phase in ("prompt", "answer"):
            self._migrations.add(0, phase, WorkerLost.code)
        self._lost_tokens.add(0)

    def watch_loop(self) -> None:
        """See `Metrics`."""
        self.metrics.watch_loop()

    def noted(self, record: RequestRecord) -> None:
        """See `RecordObserver`."""
        entry = record.entries[-1]
        event = entry.event
        if event not in COUNTED:
            return
        if record.moves and (outcome := move_outcome(record)) is not None:
            self._moves.add(1, outcome.value, record.moves[-1].cause.value)
        if event is RequestEvent.PLACED:
            self._placements.add(1, record.choices[-1].route.value)
        elif event is RequestEvent.SENDER_LOST:
            self._migrated(entry, "prompt")
        elif event is RequestEvent.LEFT_ALONE:
            self._migrated(entry, "answer")
        elif event is RequestEvent.RETRY:
            self._retried(record, entry)
        elif event in _REFUSALS:
            waited = any(earlier.event in (RequestEvent.WAITED, RequestEvent.PLACED) for earlier in record.entries)
            self._refusals.add(1, "waited" if waited else "arrival", event.value)

    def _retried(self, record: RequestRecord, entry: Entry) -> None:
        assert entry.error is not None
        if entry.error.code == Overloaded.code:
            return
        if entry.worker:  # else the loss of a prefill worker is the cause, which was counted
            self._retries.add(1, entry.error.code)
        if record.num_output_tokens:
            self._migrations.add(1, "answer", entry.error.code)

    def _migrated(self, entry: Entry, phase: str) -> None:
        assert entry.error is not None
        self._retries.add(1, entry.error.code)
        self._migrations.add(1, phase, entry.error.code)

    def ended(self, record: RequestRecord) -> None:
        """See `Ledger`."""
        finished = record.outcome == FINISHED
        self.requests.add(1, record.outcome)
        self.duration.record(record.delivered_at - record.ask.arrived_at, "" if finished else record.outcome)
        if record.ask.request_id:
            tenant = record.ask.tenant if record.ask.tenant in self._named else OTHER_TENANTS
            self._tenant_requests.add(1, tenant, "yes" if finished else "no")
            if finished:
                self._finished(record)
            elif record.outcome != Cancelled.code:
                self.counts.num_failed += 1
        if not finished:
            self._lost_tokens.add(record.num_given_tokens)

    def _finished(self, record: RequestRecord) -> None:
        counts, num_prompt_tokens = self.counts, record.ask.num_prompt_tokens
        counts.num_finished += 1
        counts.num_prompt_tokens += num_prompt_tokens
        counts.num_cached_tokens += record.num_cached_tokens
        assert record.reason is not None
        self.finished_requests.add(1, _REASONS[record.reason])
        self._times(record)
        self.prompt_len.record(num_prompt_tokens)
        self.output_len.record(record.num_given_tokens)
        self.tokens.add_each(
            _KINDS,
            (
                num_prompt_tokens,
                record.num_cached_tokens,
                record.num_fetched_tokens,
                record.num_peer_tokens,
                record.num_given_tokens,
            ),
        )
        self._count_prefix(record)

    def _times(self, record: RequestRecord) -> None:
        split = ttft_split(record)
        if not split.ttft_ms:
            return  # the client had it as a whole already
        self.ttft.record(split.ttft_ms / 1e3)
        self.queue.record(split.queue_ms / 1e3)
        tpot = tpot_s(record)
        if tpot is not None:
            self.tpot.record(tpot)
            if record.prefill_worker:
                self._exposed.record(split.ship_exposed_ms / 1e3)
        self._ttft_parts.add_each(_PARTS, [taken_ms / 1e3 for taken_ms in split[: len(_PARTS)]])

    def _count_prefix(self, record: RequestRecord) -> None:
        """Counts prompt tokens by tenant and by the source of their KV."""
        tenant, num_prompt_tokens, peer = record.ask.tenant, record.ask.num_prompt_tokens, record.num_peer_tokens
        store = record.num_fetched_tokens - peer
        local = record.num_cached_tokens - record.num_fetched_tokens
        counts = self.tenants.get(tenant) or self.tenants[OTHER_TENANTS]
        counts.num_requests += 1
        counts.num_prompt_tokens += num_prompt_tokens
        counts.num_local_tokens += local
        counts.num_peer_tokens += peer
        counts.num_store_tokens += store
        places = self._places.get(tenant) or self._places[OTHER_TENANTS]
        computed = num_prompt_tokens - record.num_cached_tokens
        self._prefixes.add_each(places, (max(0, local), peer, max(0, store), max(0, computed)))

    def picked(self, outcome: str) -> None:
        """A gateway asked for an endpoint."""
        self._picks.add(1, outcome)

    @property
    def registry(self) -> CollectorRegistry:
        """What the page is made of."""
        return self.metrics.registry

    def page(self) -> bytes:
        """The Prometheus text format."""
        return self.metrics.page()

    def close(self) -> None:
        """Ends the collection."""
        self.metrics.close()
