"""`summary.json`: the figures of a run, with the names of `vllm bench serve --save-result` where they exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from loadtest.metrics import (
    RequestMetrics,
    distribution,
    goodput,
    inter_token_s,
    num_output_tokens,
    request_metrics,
)
from loadtest.records import RequestRecord, TtftSplit
from loadtest.run import RunResult

FORMAT_VERSION = 1


def summarize(result: RunResult) -> dict[str, Any]:
    """The content of `summary.json`; plain JSON values, null for figures without data."""
    reasons = invalid_reasons(result)
    return {
        "format_version": FORMAT_VERSION,
        **_identity(result),
        **_throughput(result),
        **_latencies(result.records),
        **_goodput(result),
        **_failures(result.records),
        **_cache(result),
        "ttft_split_ms": ttft_split(result.records),
        "causes": [asdict(line) for line in result.causes],
        "schedule_lag_ms": schedule_lag_ms(result.records),
        "generator": None if result.own_load is None else asdict(result.own_load),
        "invalid": bool(reasons),
        "invalid_reasons": reasons,
        "partial": bool(result.stopped),
        "partial_reason": result.stopped,
        "config": result.config.as_json(),
    }


def invalid_reasons(result: RunResult) -> list[str]:
    """Reasons why the figures do not describe the target: errors of the generator."""
    reasons = []
    lag = schedule_lag_ms(result.records)
    limit_ms = result.config.lag_limit_ms
    if lag is not None and lag["p99"] > limit_ms:
        why = "" if result.own_load is None else f" ({result.own_load})"
        reasons.append(
            f"the generator fell behind its schedule: lag p99 {lag['p99']:.1f} ms, limit {limit_ms:g} ms{why}"
        )
    return reasons


def schedule_lag_ms(records: Sequence[RequestRecord]) -> dict[str, float] | None:
    """How late requests went out; None in a closed loop."""
    lag = distribution([lag_s * 1e3 for record in records if (lag_s := record.lag_s) is not None])
    return None if lag is None else {"p50": lag.p50, "p99": lag.p99, "max": lag.max}


def ttft_split(records: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """Mean, median and p99 of each part of the server's TTFT split, ms; {} if the server sends none."""
    splits = [record.reply.split for record in records if record.ok and record.reply.split is not None]
    table = {}
    for field in fields(TtftSplit) if splits else ():
        part = distribution([getattr(split, field.name) for split in splits])
        if part is not None:
            table[field.name] = {"mean": part.mean, "p50": part.p50, "p99": part.p99}
    return table


def _identity(result: RunResult) -> dict[str, Any]:
    config = result.config
    backend = "openai" if config.target.startswith("http") else "grpc"
    return {
        "date": result.started_at,
        "label": config.label,
        "backend": backend,
        "endpoint_type": backend,
        "target": config.target,
        "model_id": result.target.model,
        "workload": config.workload,
        "seed": config.seed,
        "num_prompts": sum(record.offered for record in result.records),
        "request_rate": config.traffic.rate,
        "burstiness": config.traffic.burstiness,
        "max_concurrency": config.traffic.concurrency,
    }


def _throughput(result: RunResult) -> dict[str, Any]:
    """Over the whole duration including its tail, like vLLM."""
    done = [record for record in result.records if request_metrics(record) is not None]
    total_input = sum(
        record.num_prompt_tokens if record.reply.num_prompt_tokens is None else record.reply.num_prompt_tokens
        for record in done
    )
    total_output = sum(num_output_tokens(record) for record in done)
    duration_s = result.duration_s
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": sum(record.offered and not record.ok for record in result.records),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_s,
        "input_throughput": total_input / duration_s,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_concurrent_requests": _most_in_flight(result.records),
        "max_output_tokens_per_s": _most_tokens_per_second(done),
    }


def _latencies(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Complete answers, ms: vLLM's `mean_ttft_ms`, `median_…`, `std_…`, `p99_…` and the same for tpot, itl, e2el."""
    figures: list[RequestMetrics] = [m for record in records if (m := request_metrics(record)) is not None]
    values = {
        "ttft": [m.ttft_s for m in figures],
        "tpot": [m.tpot_s for m in figures if m.tpot_s is not None],
        "itl": [gap for record in records if record.ok for gap in inter_token_s(record)],
        "e2el": [m.e2e_s for m in figures],
    }
    table: dict[str, Any] = {}
    for name, seconds in values.items():
        found = distribution([s * 1e3 for s in seconds])
        for key in ("mean", "median", "std", "p50", "p90", "p95", "p99", "max"):
            attribute = "p50" if key == "median" else key
            table[f"{key}_{name}_ms"] = None if found is None else getattr(found, attribute)
    table["token_counts_exact"] = all(record.reply.counts_exact for record in records)
    return table


def _goodput(result: RunResult) -> dict[str, Any]:
    slo = result.config.slo
    offered = sum(record.offered for record in result.records)
    table: dict[str, Any] = {
        "window": result.window_s,
        "offered": offered,
        "planned": result.planned_requests,
        "offered_rate": offered / result.window_s if result.window_s > 0 else 0.0,
        "slo_ms": None,
        "good": None,
        "attainment": None,
        "goodput": None,
        "request_goodput": None,
    }
    if slo is not None:
        found = goodput(result.records, slo, result.window_s)
        table |= {
            "slo_ms": slo.as_ms(),
            "good": found.num_good,
            "attainment": found.attainment,
            "goodput": found.rate,
            "request_goodput": found.num_good / result.duration_s,
        }
    return table


def _failures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Counts by cause, and the first message of each cause."""
    causes: Counter[str] = Counter()
    examples: dict[str, dict[str, str]] = {}
    for record in records:
        if (failure := record.failure) is not None:
            causes[failure.cause.value] += 1
            examples.setdefault(failure.cause.value, {"kind": failure.kind, "message": failure.message})
    interrupted = causes.pop("interrupted", 0)
    return {"failures": dict(causes), "failure_examples": examples, "interrupted": interrupted}


def _cache(result: RunResult) -> dict[str, Any]:
    """Prompt tokens that the target did not compute, by its own count."""
    known = [r for r in result.records if r.ok and r.reply.num_cached_tokens is not None]
    cached = sum(record.reply.num_cached_tokens or 0 for record in known)
    prompt = sum(record.num_prompt_tokens for record in known)
    return {
        "total_cached_tokens": cached if known else None,
        "cached_share": cached / prompt if prompt else None,
        "ideal_cached_share": result.ideal_cached_share,
    }


def _most_in_flight(records: Sequence[RequestRecord]) -> int:
    changes = []
    for record in records:
        if record.reply.sent_s is not None:
            changes.append((record.reply.sent_s, 1))
            if record.reply.closed_s is not None:
                changes.append((record.reply.closed_s, -1))
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _most_tokens_per_second(records: Sequence[RequestRecord]) -> int:
    seconds: Counter[int] = Counter()
    for record in records:
        for at_s, count in zip(record.reply.token_times_s, record.reply.token_counts, strict=True):
            seconds[int(at_s)] += count
    return max(seconds.values(), default=0)
