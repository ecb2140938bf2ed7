"""The cluster as this router sees it, for operators; implements `ClusterView` for the edge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.router.dispatch.record import RequestRecord
from services.router.status.goodput_view import GoodputView
from services.router.status.joined_status import joined_status
from services.router.views.attribution.verdict import Verdict, error_code, outcome
from services.router.views.cluster_view import RequestDetail, RequestRow
from services.router.views.explanation import explanation
from services.router.views.timings import NO_SPLIT, ended_at, first_token_at, ttft_split
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
