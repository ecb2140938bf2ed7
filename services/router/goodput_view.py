"""The router's ended and running requests, over all its models, as the status and the page show them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.router.attribution.ended import Ended
from services.router.attribution.verdict import Verdict
from services.router.attribution.window import DEFAULT_WINDOW_S, MAX_WINDOW_S, Percentiles, Window, summarize
from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.states import RequestState
from services.router.edge.cluster_view import RequestDetail, RequestRow
from services.router.explanation import explanation
from services.router.request import TtftSplit
from shared.errors import InvalidRequest, NotFound
from shared.rpc.pb.tandem.v1 import inference_pb2

if TYPE_CHECKING:
    from services.router.served_model import ServedModel

MAX_RUNNING = 40
MAX_ENDED = 40
"""Rows in one answer."""
KEPT_S = 0.5
"""A window is made at most this often, however many ask."""
_KEPT_WINDOWS = 8

_SPLIT = (
    "queue_ms",
    "placement_ms",
    "reserve_ms",
    "prefix_fetch_ms",
    "prefill_queue_ms",
    "prefill_compute_ms",
    "return_ms",
)


class GoodputView:
    """Reads what the dispatchers remember; on the event loop alone."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        self._windows: dict[float, tuple[float, inference_pb2.GoodputWindow]] = {}

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
        rings = [model.dispatcher.ended for model in self._models]
        found = [entry for ring in rings for entry in ring.within(asked, now_s)]
        reach_s = min(ring.reach_s(asked, now_s) for ring in rings)
        made = _to_proto(summarize(found, rings[0].targets, reach_s))
        self._windows[asked] = (now_s, made)
        return made

    def flow(self) -> inference_pb2.RequestFlow:
        """Requests by what happens to them now."""
        now = Counter(active.state for model in self._models for active in model.dispatcher.running)
        return inference_pb2.RequestFlow(
            num_queued=now[RequestState.QUEUED],
            num_reserved=now[RequestState.RESERVED],
            num_prefilling=now[RequestState.PREFILLING],
            num_shipping=now[RequestState.SHIPPING] + now[RequestState.RESUMING],
            num_decoding=now[RequestState.DECODING],
        )

    def requests(self, tenant: str) -> list[RequestRow]:
        """See `ClusterView`."""
        now_s = time.perf_counter()
        running: list[RequestRow] = []
        ended: list[tuple[float, RequestRow]] = []
        for model in self._models:
            for active in model.dispatcher.running:
                if len(running) == MAX_RUNNING:
                    break
                if tenant in ("", active.request.tenant):
                    running.append(_running_row(model.name, active, now_s))
            # Where only one tenant's are shown, they may lie anywhere among the others'.
            count = MAX_ENDED if not tenant else len(model.dispatcher.ended)
            mine = [e for e in model.dispatcher.ended.newest(count, now_s) if tenant in ("", e[0].tenant)][:MAX_ENDED]
            ended += [(entry.ended_s, _ended_row(model.name, entry, verdict, now_s)) for entry, verdict in mine]
        ended.sort(key=lambda item: -item[0])
        return [*running, *(row for _, row in ended[:MAX_ENDED])]

    def request(self, request_id: str, tenant: str) -> RequestDetail:
        """See `ClusterView`."""
        now_s = time.perf_counter()
        for model in self._models:
            decisions = model.dispatcher.decisions
            told = explanation(decisions, request_id) if decisions.of(request_id) else None
            active = model.dispatcher.active(request_id)
            if active is not None and tenant in ("", active.request.tenant):
                row = _running_row(model.name, active, now_s)
                return RequestDetail(row, _split(active.summary.ttft), {}, told)
            found = model.dispatcher.ended.find(request_id, now_s)
            if active is None and found is not None and tenant in ("", found[0].tenant):
                ended, verdict = found
                parts = {cause.value: 1e3 * seconds for cause, seconds in verdict.parts.items()}
                row = _ended_row(model.name, ended, verdict, now_s)
                return RequestDetail(row, _split(ended.summary.ttft), parts, told)
        raise NotFound(f"this router remembers no request {request_id!r}", field="request_id", value=request_id)


def _running_row(model: str, active: ActiveRequest, now_s: float) -> RequestRow:
    age_ms = (now_s - active.timeline.accepted) * 1e3
    first = active.timeline.first_token
    return RequestRow(
        active.request.request_id,
        model,
        active.state.value,
        active.request.num_prompt_tokens,
        active.summary.num_cached_tokens,
        len(active.produced) - active.num_resumed,
        age_ms,
        age_ms,
        (first - active.timeline.accepted) * 1e3 if first else None,
        None,
        active.summary.prefill_worker,
        active.summary.decode_worker,
    )


def _ended_row(model: str, ended: Ended, verdict: Verdict, now_s: float) -> RequestRow:
    ttft_s, tpot_s = ended.ttft_s, ended.tpot_s
    return RequestRow(
        ended.request_id,
        model,
        ended.outcome.value,
        ended.num_prompt_tokens,
        ended.summary.num_cached_tokens,
        ended.num_output_tokens,
        (now_s - ended.ended_s) * 1e3,
        (ended.ended_s - ended.arrived_s) * 1e3,
        None if ttft_s is None else ttft_s * 1e3,
        None if tpot_s is None else tpot_s * 1e3,
        ended.summary.prefill_worker,
        ended.summary.decode_worker,
        verdict.missed,
        verdict.lost_to.value if verdict.lost_to is not None else "",
        ended.error,
    )


def _split(split: TtftSplit) -> dict[str, float]:
    return {name: getattr(split, name) for name in _SPLIT} if split.ttft_ms else {}


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
