"""The page under vLLM's names: what dashboards, autoscalers and gateways of vLLM ask for, with our figures."""

from __future__ import annotations

import re
from types import SimpleNamespace

from services.router.edge.ledger import FINISHED, RequestEnd
from services.router.metrics import RouterMetrics
from services.router.observed import RouterSources
from services.router.request import FinishReason, Request, RequestSummary, TtftSplit
from services.router.vllm_names import VLLM, vllm_labels
from shared.engine.sampling_params import SamplingParams
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
    request = Request("r", (1, 2, 3, 4), SamplingParams(max_tokens=9, seed=1))
    summary = RequestSummary(num_cached_tokens=3, ttft=TtftSplit(ttft_ms=30.0, queue_ms=2.0))
    counts.ended(RequestEnd(FINISHED, 0.5, request, FinishReason.STOP, 5, summary, tokens_s=0.4))
    counts.ended(RequestEnd("overloaded", 0.1, request))
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
        "time_per_output_token_seconds_sum": 0.1,
        "e2e_request_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 0.5,
        "request_queue_time_seconds_sum": 0.002,
        "request_generation_tokens_sum": 5,
    }.items():
        assert found[f"vllm:{name}{{{LABELS}}}"] == value, name
    assert found['vllm:request_success_total{engine="0",finished_reason="stop",model_name="demo"}'] == 1
    counts.close()
