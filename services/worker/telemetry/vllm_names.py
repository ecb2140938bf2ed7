"""A worker's figures under vLLM's names, for autoscalers and dashboards that look at each Pod."""

from __future__ import annotations

from services.worker.telemetry.metrics import WorkerSources
from shared.engine.step_counters import STEP_BUCKETS_S
from shared.telemetry.metrics import Observed, counter, gauge, histogram


def _kv_share(worker: WorkerSources) -> float:
    load = worker.load
    return 1 - load.num_free_blocks / load.num_total_blocks if load.num_total_blocks else 0.0


VLLM: tuple[Observed[WorkerSources], ...] = (
    Observed(
        gauge("vllm:num_requests_running", "As tandem_engine_running_sequences."),
        lambda worker: worker.load.num_running,
    ),
    Observed(
        gauge("vllm:num_requests_waiting", "As tandem_engine_waiting_sequences."),
        lambda worker: worker.load.num_waiting,
    ),
    Observed(
        gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the KV pool's blocks that running answers have or are expected to take, 0 to 1.",
        ),
        _kv_share,
    ),
    Observed(
        counter("vllm:num_preemptions_total", "As tandem_engine_preemptions_total."),
        lambda worker: worker.load.num_preemptions,
    ),
    Observed(
        counter("vllm:prefix_cache_queries_total", "As tandem_prompt_tokens_total."),
        lambda worker: worker.load.num_prompt_tokens,
    ),
    Observed(
        counter("vllm:prefix_cache_hits_total", "As tandem_prefix_hit_tokens_total."),
        lambda worker: worker.load.num_prefix_hit_tokens,
    ),
    Observed(
        counter("vllm:prompt_tokens_total", "As tandem_prompt_tokens_total."),
        lambda worker: worker.load.num_prompt_tokens,
    ),
    Observed(
        counter("vllm:generation_tokens_total", "As tandem_engine_output_tokens_total."),
        lambda worker: worker.steps.num_output_tokens,
    ),
    Observed(
        histogram("vllm:inter_token_latency_seconds", "As tandem_engine_inter_token_seconds.", STEP_BUCKETS_S),
        lambda worker: worker.steps.gaps_s,
    ),
)
"""By the setting `vllm_metrics`."""
