"""`python -m loadtest.bench kernels`: each Triton kernel beside the limits of this GPU.

Both limits are measured in the same run: memory by a large copy, arithmetic by a large matrix product. Every case
runs as a replayed CUDA graph on a cold cache, so neither Python nor the cache is part of a time.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Annotated

import torch

from loadtest.bench.kernels.limits import Clock, Limits, cuda_device, graph_clock, limit_results, measure_limits
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result, verdicts
from shared.kernels.bench_case import Case


def measure(case: Case, limits: Limits, clock: Clock) -> tuple[Result, float]:
    """The case's rate beside its limit, and the seconds that one call took."""
    seconds = clock(case.run)
    if case.num_flops:
        rate, limit, scale, unit = case.num_flops / seconds, limits.flops_per_s, 1e12, "TFLOP/s"
    else:
        rate, limit, scale, unit = case.num_bytes / seconds, limits.bytes_per_s, 1e9, "GB/s"
    return Result(f"{case.op}, {case.shape}", rate / scale, unit, limit / scale, rate / limit), seconds


def all_cases(device: torch.device) -> Iterator[Case]:
    """Every op's cases at the shapes of 8B models, in 16 bits."""
    from shared.kernels.activation import bench as activation
    from shared.kernels.attention.bench_batch import pool_memory
    from shared.kernels.attention.decode import bench as decode
    from shared.kernels.attention.latent import bench as latent
    from shared.kernels.attention.prefill import bench as prefill
    from shared.kernels.blocks import bench as blocks
    from shared.kernels.delta import bench as delta
    from shared.kernels.experts import bench as experts
    from shared.kernels.matmul import bench as matmul
    from shared.kernels.rmsnorm import bench as rmsnorm
    from shared.kernels.rotary import bench as rotary
    from shared.kernels.sampling import bench as sampling

    memory = pool_memory(device)
    for attention in (decode, prefill):
        yield from attention.cases(device, memory=memory)
    for module in (rmsnorm, rotary, activation, blocks, sampling, matmul, experts, latent, delta):
        yield from module.cases(device)


def tuning_cases(device: torch.device, only: str = "") -> Iterator[Case]:
    """The sizes that the ops could be compiled for whose names contain `only`; the inputs of others are not made."""
    from shared.kernels.attention.bench_batch import pool_memory
    from shared.kernels.attention.decode import bench as decode
    from shared.kernels.attention.latent import bench as latent
    from shared.kernels.attention.prefill import bench as prefill
    from shared.kernels.experts import bench as experts
    from shared.kernels.sampling import bench as sampling

    if only in "sampling":
        yield from sampling.tuning_cases(device)
    if only in "experts":
        yield from experts.tuning_cases(device)
    if only in "attention to latents":
        yield from latent.tuning_cases(device)
    if only in "decode attention" or only in "prefill attention":
        memory = pool_memory(device)
        for module in (decode, prefill):
            yield from module.tuning_cases(device, memory)


_HEADS = "32/8 heads of 128"
GOALS = {
    f"decode attention, 64 × 4096 tokens, {_HEADS}, blocks of 16": 0.85,
    f"prefill attention, 1 × 8192 of 8192 tokens, {_HEADS}, blocks of 16": 0.60,
    "rms norm, 8192 × 4096": 0.85,
    "add + rms norm, 8192 × 4096": 0.85,
    f"rotate + write, 8192 tokens, {_HEADS}": 0.85,
    "silu · mul, 8192 × 14336": 0.85,
    "gather blocks, 512 × 2048 KiB": 0.85,
}
"""An H200 is to reach these shares of its limits."""


def measure_each(cases: Iterable[Case], limits: Limits, clock: Clock, report: Report) -> list[str]:
    """Measures the cases, prints each one's line at once, and continues after one that raises.

    Returns:
        The names of the cases that failed. A failure's traceback is printed.
    """
    failed: list[str] = []
    for case in cases:
        try:
            result, seconds = measure(case, limits, clock)
        except Exception:
            failed.append(f"{case.op}, {case.shape}")
            print(f"failed: {failed[-1]}\n{traceback.format_exc()}", flush=True)
            continue
        share = f"{result.fraction:.0%} of the limit"
        print(f"{result.name}: {seconds * 1e6:,.1f} µs, {result.value:,.4g} {result.unit}, {share}", flush=True)
        report.add([result])
    return failed


def main(
    only: Annotated[str, Option("ops whose name contains this")] = "",
    tune: Annotated[bool, Option("possible sizes of attention, experts, latents and sampling instead")] = False,
    codes: Annotated[bool, Option("products with weights in codes instead; with --tune over tile sizes")] = False,
    out: Out = None,
) -> None:
    """Measure the Triton kernels beside the limits of this GPU."""
    device = cuda_device("the kernel benchmark")
    limits = measure_limits(graph_clock, device)
    report = Report(out)
    report.add(limit_results(limits))
    report.print()
    if codes:
        from shared.kernels.coded import bench as coded

        chosen = coded.tuning_cases(device) if tune else coded.cases(device)
    else:
        chosen = tuning_cases(device, only) if tune else all_cases(device)
    cases = (case for case in chosen if only in case.op)
    failed = measure_each(cases, limits, graph_clock, report)
    print("\n".join(["", *verdicts(GOALS, report.results), *(f"failed: {name}" for name in failed)]), flush=True)
    if failed:
        sys.exit(1)
