"""The page under vLLM's names: what dashboards, autoscalers and gateways of vLLM ask for, with our figures."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from services.router.dispatch.record import FINISHED, Ask, RequestEvent, RequestRecord, RequestState
from services.router.dispatch.request import FinishReason
from services.router.views.metrics import RouterMetrics
from services.router.views.observed import RouterSources
from services.router.views.vllm_names import VLLM, vllm_labels
from shared.rpc.pb.tandem.v1 import types_pb2

LABELS = 'engine="0",model_name="demo"'


def values(page: str) -> dict[str, float]:
    found = re.findall(r"^(vllm:\S+) (\S+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_figures_appear_under_vllms_names_and_labels() -> None:
    counts = RouterMetrics("demo")
    load = types_pb2.Load(num_free_blocks=25, num_total_blocks=100)
    links = {"d0": SimpleNamespace(connected=True, load=load), "d1": SimpleNamespace(connected=False, load=load)}
    dispatcher = SimpleNamespace(num_active=7, num_waiting=2)
    sources = RouterSources(dispatcher, SimpleNamespace(decodes=links), None, counts)  # type: ignore[arg-type]
    counts.metrics.observe(VLLM, sources, vllm_labels("demo"))
    record = RequestRecord(Ask("r", num_prompt_tokens=4), num_cached_tokens=3)
    for at, event, state in (
        (0.0, RequestEvent.MATCHED, RequestState.QUEUED),
        (0.002, RequestEvent.PLACED, RequestState.RESERVED),
        (0.03, RequestEvent.JOINED, RequestState.DECODING),
        (0.43, RequestEvent.FINISH, RequestState.FINISHED),
    ):
        record.add(event, state, at=1.0 + at)
    record.ask = record.ask._replace(arrived_at=1.0)
    record.close(FINISHED, FinishReason.STOP, 5)
    record.delivered_at = 1.5
    counts.ended(record)
    refused = RequestRecord(record.ask)
    refused.close("overloaded")
    counts.ended(refused)
    found = values(counts.page().decode())
    for name, value in {
        "num_requests_running": 5,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.75,
        "prefix_cache_queries_total": 4,
        "prefix_cache_hits_total": 3,
        "prompt_tokens_total": 4,
        "generation_tokens_total": 5,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.03,
        "time_per_output_token_seconds_sum": 0.1175,  # until the client had it
        "e2e_request_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 0.5,
        "request_queue_time_seconds_sum": 0.002,
        "request_generation_tokens_sum": 5,
    }.items():
        assert found[f"vllm:{name}{{{LABELS}}}"] == pytest.approx(value), name
    assert found['vllm:request_success_total{engine="0",finished_reason="stop",model_name="demo"}'] == 1
    counts.close()
