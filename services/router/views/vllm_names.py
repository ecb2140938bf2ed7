"""Figures of the router under vLLM's names, for dashboards, autoscalers and gateways that know these.

Names as of vLLM 0.11 and later; `time_per_output_token_seconds` has the one of earlier releases too. vLLM counts tokens
as it computes them, we count those of finished requests; the buckets are ours. There is no
`inter_token_latency_seconds` here: the decode workers have it.
"""

from __future__ import annotations

from services.router.views.metric_definitions import DURATION, OUTPUT_LEN, PROMPT_LEN, QUEUE, TPOT, TTFT
from services.router.views.observed import RouterSources
from shared.telemetry.metrics import Metric, Observed, counter, gauge, histogram


def _kv_share(router: RouterSources) -> float:
    loads = [link.load for link in router.fleet.decodes.values() if link.connected]
    total = sum(load.num_total_blocks for load in loads)
    return 1 - sum(load.num_free_blocks for load in loads) / total if total else 0.0


def _as(name: str, ours: Metric) -> Metric:
    return histogram(f"vllm:{name}", f"As {ours.exposed_name}, finished requests.", ours.buckets)


VLLM: tuple[Observed[RouterSources], ...] = (
    Observed(
        gauge("vllm:num_requests_running", "As tandem_router_running_requests."), lambda router: router.num_running
    ),
    Observed(
        gauge("vllm:num_requests_waiting", "As tandem_router_waiting_requests."),
        lambda router: router.dispatcher.num_waiting,
    ),
    Observed(
        gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the decode workers' KV blocks that running answers have or are expected to take, 0 to 1.",
        ),
        _kv_share,
    ),
    Observed(
        counter("vllm:prefix_cache_queries_total", "Prompt tokens of finished requests."),
        lambda router: router.counts.counts.num_prompt_tokens,
    ),
    Observed(
        counter("vllm:prefix_cache_hits_total", "Of these, tokens that were not computed."),
        lambda router: router.counts.counts.num_cached_tokens,
    ),
    Observed(
        counter("vllm:prompt_tokens_total", "Prompt tokens of finished requests."),
        lambda router: router.counts.counts.num_prompt_tokens,
    ),
    Observed(
        counter("vllm:generation_tokens_total", "Output tokens of finished requests."),
        lambda router: router.counts.tokens.read().get(("output",), 0),
    ),
    Observed(
        counter("vllm:request_success_total", "As tandem_finished_requests_total.", "finished_reason"),
        lambda router: router.counts.finished_requests.read(),
    ),
    Observed(_as("time_to_first_token_seconds", TTFT), lambda router: router.counts.ttft.series()),
    Observed(_as("time_per_output_token_seconds", TPOT), lambda router: router.counts.tpot.series()),
    Observed(_as("request_time_per_output_token_seconds", TPOT), lambda router: router.counts.tpot.series()),
    Observed(_as("e2e_request_latency_seconds", DURATION), lambda router: router.counts.duration.series("")),
    Observed(_as("request_queue_time_seconds", QUEUE), lambda router: router.counts.queue.series()),
    Observed(_as("request_prompt_tokens", PROMPT_LEN), lambda router: router.counts.prompt_len.series()),
    Observed(_as("request_generation_tokens", OUTPUT_LEN), lambda router: router.counts.output_len.series()),
)
"""By the setting `vllm_metrics`, with vLLM's own labels `model_name` and `engine`."""


def vllm_labels(model_name: str) -> dict[str, str]:
    """Labels of every sample; a cluster is one engine."""
    return {"model_name": model_name, "engine": "0"}
