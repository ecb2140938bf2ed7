"""The cluster as this router sees it, for operators; implements `ClusterView` for the edge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.router.attribution.ended import Ended
from services.router.attribution.verdict import Verdict
from services.router.dispatch.active_request import ActiveRequest
from services.router.edge.cluster_view import RequestDetail, RequestRow
from services.router.explanation import explanation
from services.router.goodput_view import GoodputView
from services.router.joined_status import joined_status
from services.router.request import TtftSplit
from shared.errors import NotFound
from shared.rpc.pb.tandem.v1 import inference_pb2

if TYPE_CHECKING:
    from services.router.served_model import ServedModel

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
        active.num_output_tokens,
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
    return {f"{name}_ms": taken_ms for name, taken_ms in split.parts_ms.items()} if split.ttft_ms else {}
