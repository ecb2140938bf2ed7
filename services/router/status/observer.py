"""The cluster as this router sees it, for operators; implements `ClusterView` for the edge."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from services.router.dispatch.answer_move import PREPARING
from services.router.dispatch.record import RequestRecord, RequestState
from services.router.served_model import ServedModel
from services.router.views.attribution.better_split import SplitVerdict, judge_split, mix_of, targets_of
from services.router.views.attribution.verdict import Verdict, error_code, outcome
from services.router.views.attribution.window import DEFAULT_WINDOW_S, MAX_WINDOW_S, Percentiles, Window, summarize
from services.router.views.cluster_view import RequestDetail, RequestRow
from services.router.views.explanation import explanation
from services.router.views.timings import NO_SPLIT, ended_at, first_token_at, ttft_split
from shared.errors import InvalidRequest, NotFound
from shared.rpc.pb.tandem.v1 import inference_pb2

_SUMS = (
    "queue_len",
    "queue_limit",
    "num_running",
    "num_finished",
    "num_failed",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_store_errors",
)
"""Counts of a ClusterStatus."""


def joined_status(models: Sequence[ServedModel], cache_failures: Sequence[str]) -> inference_pb2.ClusterStatus:
    """The whole cluster: one model's status, or the sums over several and each one's own line in `models`."""
    parts = [model.status() for model in models]
    whole = parts[0]
    whole.degraded[:] = [*cache_failures, *whole.degraded]
    if len(models) == 1:
        return whole
    for model, part in zip(models, parts, strict=True):
        for worker in part.workers:
            worker.model = model.name
    lines = [_line(model, part) for model, part in zip(models, parts, strict=True)]
    for part in parts[1:]:
        whole.workers.extend(part.workers)
        whole.degraded.extend(part.degraded)
        for field in _SUMS:
            setattr(whole, field, getattr(whole, field) + getattr(part, field))
        whole.store_available = whole.store_available and part.store_available
    whole.ClearField("split")
    whole.ready = any(line.ready for line in lines)
    whole.not_ready_reason = "" if whole.ready else "; ".join(f"{x.name}: {x.not_ready_reason}" for x in lines)
    whole.degraded.extend(f"model {line.name}: {line.not_ready_reason}" for line in lines if not line.ready)
    whole.models.extend(lines)
    return whole


def _line(model: ServedModel, status: inference_pb2.ClusterStatus) -> inference_pb2.ModelStatus:
    return inference_pb2.ModelStatus(
        split=status.split if status.HasField("split") else None,
        name=model.name,
        aliases=model.settings.aliases,
        ready=status.ready,
        not_ready_reason=status.not_ready_reason,
        mode=status.mode,
        max_model_len=model.fleet.max_model_len,
        queue_len=status.queue_len,
        num_running=status.num_running,
    )


KEPT_S = 0.5
"""A window is made at most this often, however many ask."""
_KEPT_WINDOWS = 8
SPLIT_KEPT_S = 5.0
"""A judgement of the split, which takes milliseconds of the event loop, is made at most this often."""
_DECODING = (RequestState.DECODING, *PREPARING, RequestState.REPEATING)


class GoodputView:
    """Reads the records that ended, and those of the dispatchers; on the event loop alone."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        self._windows: dict[float, tuple[float, inference_pb2.GoodputWindow]] = {}
        self._splits: dict[float, tuple[float, inference_pb2.SplitVerdict | None]] = {}

    def window(self, window_s: float = 0.0) -> inference_pb2.GoodputWindow:
        """The last `window_s` seconds, 0 = 60. Raises InvalidRequest (`window_s`)."""
        asked = window_s or DEFAULT_WINDOW_S
        if not (math.isfinite(asked) and 1.0 <= asked <= MAX_WINDOW_S):
            raise InvalidRequest(
                f"window_s must be 1 to {MAX_WINDOW_S:g}, got {window_s:g}",
                field="window_s", limit=MAX_WINDOW_S, value=window_s,
            )  # fmt: skip
        now_s = time.perf_counter()
        made_s, kept = self._windows.get(asked, (-math.inf, None))
        if kept is not None and now_s - made_s < KEPT_S:
            return kept
        if len(self._windows) >= _KEPT_WINDOWS:
            self._windows.clear()
        rings = [model.requests.ended for model in self._models]
        reach_s = min(ring.reach_s(asked, now_s) for ring in rings)
        found = [entry for ring in rings for entry in ring.within(reach_s, now_s)]
        made = _to_proto(summarize(found, rings[0].targets, reach_s))
        split = self._split(asked, now_s)
        if split is not None:
            made.split.CopyFrom(split)
        self._windows[asked] = (now_s, made)
        return made

    def _split(self, asked_s: float, now_s: float) -> inference_pb2.SplitVerdict | None:
        """The split that could gain most, of several models'."""
        made_s, kept = self._splits.get(asked_s, (-math.inf, None))
        if now_s - made_s < SPLIT_KEPT_S:
            return kept
        if len(self._splits) >= _KEPT_WINDOWS:
            self._splits.clear()
        found = [
            (verdict, model.name) for model in self._models if (verdict := _split_of(model, asked_s, now_s)) is not None
        ]
        made = None
        if found:
            verdict, name = max(found, key=lambda one: one[0].gain)
            made = _split_to_proto(verdict, name if len(self._models) > 1 else "")
        self._splits[asked_s] = (now_s, made)
        return made

    def flow(self) -> inference_pb2.RequestFlow:
        """Requests by what happens to them now."""
        now = Counter(active.state for model in self._models for active in model.dispatcher.running)
        state = RequestState
        return inference_pb2.RequestFlow(
            num_queued=now[state.QUEUED],
            num_reserved=now[state.RESERVED] + now[state.REASSIGNING] + now[state.REASSIGNING_HELD],
            num_prefilling=now[state.PREFILLING] + now[state.OVERTAKEN],
            num_shipping=now[state.SHIPPING] + now[state.RESUMING] + now[state.RESUMING_HELD],
            num_decoding=sum(now[each] for each in _DECODING),
        )


def _split_of(model: ServedModel, window_s: float, now_s: float) -> SplitVerdict | None:
    ring, fleet = model.requests.ended, model.used_fleet()
    mix = mix_of(ring.within(window_s, now_s), window_s, now_s)
    if fleet is None or mix is None:
        return None
    return judge_split(fleet, mix, targets_of(ring.targets.ttft_s, ring.targets.tpot_s))


def _split_to_proto(verdict: SplitVerdict, model: str) -> inference_pb2.SplitVerdict:
    return inference_pb2.SplitVerdict(
        num_workers=verdict.num_workers,
        num_decoding=verdict.num_decoding,
        headroom=verdict.headroom,
        best_decoding=verdict.best_decoding,
        best_headroom=verdict.best_headroom,
        elastic=verdict.is_elastic,
        worth_it=verdict.is_worth_it,
        model=model,
    )


def _to_proto(window: Window) -> inference_pb2.GoodputWindow:
    return inference_pb2.GoodputWindow(
        window_s=window.window_s,
        num_requests=window.num_requests,
        num_good=window.num_good,
        num_refused=window.num_refused,
        num_failed=window.num_failed,
        goodput=window.goodput,
        ttft_target_ms=window.targets.ttft_s * 1e3,
        tpot_target_ms=window.targets.tpot_s * 1e3,
        ttft=_percentiles(window.ttft),
        tpot=_percentiles(window.tpot),
        num_prompt_tokens=window.num_prompt_tokens,
        num_cached_tokens=window.num_cached_tokens,
        num_output_tokens=window.num_output_tokens,
        binding=window.binding.value if window.binding is not None else "",
        causes=[
            inference_pb2.CauseShare(
                cause=share.cause.value,
                num_lost=share.num_lost,
                lost_share=share.lost_share,
                time_share=share.time_share,
            )
            for share in window.causes
        ],
    )


def _percentiles(values: Percentiles) -> inference_pb2.Percentiles:
    return inference_pb2.Percentiles(p50_ms=values.p50 * 1e3, p95_ms=values.p95 * 1e3, p99_ms=values.p99 * 1e3)


MAX_RUNNING = 40
MAX_ENDED = 40
"""Rows in one answer."""


class Observer:
    """One router's; on the event loop alone."""

    def __init__(self, models: Sequence[ServedModel], cache_failures: Callable[[], Sequence[str]]) -> None:
        """`cache_failures`: what the cache's watch has to say."""
        self._models = models
        self._cache_failures = cache_failures
        self._goodput = GoodputView(models)

    def status(self, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        """See `ClusterView`. Raises InvalidRequest (`window_s`)."""
        window = self._goodput.window(window_s)
        whole = joined_status(self._models, self._cache_failures())
        whole.window.CopyFrom(window)
        whole.flow.CopyFrom(self._goodput.flow())
        return whole

    def requests(self, tenant: str) -> list[RequestRow]:
        """See `ClusterView`."""
        now_s = time.perf_counter()
        running: list[RequestRow] = []
        ended: list[tuple[float, RequestRow]] = []
        for model in self._models:
            for active in model.dispatcher.running:
                if len(running) == MAX_RUNNING:
                    break
                if tenant in ("", active.request.tenant) and not active.state.ended:
                    running.append(_running_row(model.name, active.record, now_s))
            # Where only one tenant's are shown, they may lie anywhere among the others'.
            ring = model.requests.ended
            found = ring.newest(MAX_ENDED if not tenant else len(ring), now_s)
            mine = [(record, verdict) for record, verdict in found if tenant in ("", record.ask.tenant)][:MAX_ENDED]
            ended += [(ended_at(record), _ended_row(model.name, record, verdict, now_s)) for record, verdict in mine]
        ended.sort(key=lambda item: -item[0])
        return [*running, *(row for _, row in ended[:MAX_ENDED])]

    def request(self, request_id: str, tenant: str) -> RequestDetail:
        """See `ClusterView`."""
        now_s = time.perf_counter()
        for model in self._models:
            active = model.dispatcher.active(request_id)
            if active is not None and not active.state.ended:
                if tenant in ("", active.request.tenant):
                    row = _running_row(model.name, active.record, now_s)
                    return self._detail(model, row, active.record, {})
                continue
            found = model.requests.ended.find(request_id, now_s)
            if found is not None and tenant in ("", found[0].ask.tenant):
                record, verdict = found
                parts = {cause.value: 1e3 * seconds for cause, seconds in verdict.parts.items()}
                return self._detail(model, _ended_row(model.name, record, verdict, now_s), record, parts)
        raise NotFound(f"this router remembers no request {request_id!r}", field="request_id", value=request_id)

    def _detail(
        self, model: ServedModel, row: RequestRow, record: RequestRecord, parts: dict[str, float]
    ) -> RequestDetail:
        split = ttft_split(record)
        shown = {f"{name}_ms": taken_ms for name, taken_ms in split.parts_ms.items()} if split is not NO_SPLIT else {}
        explained = model.requests.explained.find(row.request_id)
        return RequestDetail(row, shown, parts, explanation(explained, row.request_id) if explained else None)


def _running_row(model: str, record: RequestRecord, now_s: float) -> RequestRow:
    ask, first = record.ask, first_token_at(record)
    age_ms = (now_s - ask.arrived_at) * 1e3
    return RequestRow(
        ask.request_id,
        model,
        record.state.value,
        ask.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        age_ms,
        age_ms,
        (first - ask.arrived_at) * 1e3 if first else None,
        None,
        record.prefill_worker,
        record.decode_worker,
    )


def _ended_row(model: str, record: RequestRecord, verdict: Verdict, now_s: float) -> RequestRow:
    ask, end, ended = record.ask, ended_at(record), outcome(record)
    return RequestRow(
        ask.request_id,
        model,
        ended.value if ended is not None else "",
        ask.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        (now_s - end) * 1e3,
        (end - ask.arrived_at) * 1e3,
        None if verdict.ttft_s is None else verdict.ttft_s * 1e3,
        None if verdict.tpot_s is None else verdict.tpot_s * 1e3,
        record.prefill_worker,
        record.decode_worker,
        verdict.missed,
        verdict.lost_to.value if verdict.lost_to is not None else "",
        error_code(record),
    )
