"""`python -m loadtest.bench kernels`: each Triton kernel beside the limits of this GPU.

Both limits are measured in the same run: memory by a large copy, arithmetic by a large matrix product. Every case
runs as a replayed CUDA graph on a cold cache, so neither Python nor the cache is part of a time.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch

from loadtest import figures
from loadtest.bench.kernels.limits import Clock, Limits, graph_clock, limit_results, measure_limits
from loadtest.command_line import Option, Out
from shared.errors import ConfigError
from shared.kernels.bench_case import Case


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    op: str
    shape: str
    time_us: float
    achieved: float  # GB/s or TFLOP/s
    unit: str
    share: float  # of the measured limit


def measure(case: Case, limits: Limits, clock: Clock) -> Result:
    """Time one case and set it against its limit."""
    seconds = clock(case.run)
    if case.num_flops:
        rate, limit, scale, unit = case.num_flops / seconds, limits.flops_per_s, 1e12, "TFLOP/s"
    else:
        rate, limit, scale, unit = case.num_bytes / seconds, limits.bytes_per_s, 1e9, "GB/s"
    return Result(case.op, case.shape, seconds * 1e6, rate / scale, unit, rate / limit)


def all_cases(device: torch.device) -> Iterator[Case]:
    """Every op's cases at the shapes of 8B models, in 16 bits."""
    from shared.kernels.activation import bench as activation
    from shared.kernels.attention.decode import bench as decode
    from shared.kernels.attention.hopper import bench as hopper
    from shared.kernels.attention.latent import bench as latent
    from shared.kernels.attention.prefill import bench as prefill
    from shared.kernels.blocks import bench as blocks
    from shared.kernels.experts import bench as experts
    from shared.kernels.matmul import bench as matmul
    from shared.kernels.rmsnorm import bench as rmsnorm
    from shared.kernels.rotary import bench as rotary
    from shared.kernels.sampling import bench as sampling

    for module in (decode, prefill, hopper, rmsnorm, rotary, activation, blocks, sampling, matmul, experts, latent):
        yield from module.cases(device)


def tuning_cases(device: torch.device) -> Iterator[Case]:
    """Both attention kernels over the sizes that they could be compiled for."""
    from shared.kernels.attention.decode import bench as decode
    from shared.kernels.attention.prefill import bench as prefill

    yield from decode.tuning_cases(device)
    yield from prefill.tuning_cases(device)


def peer_cases(device: torch.device) -> Iterator[Case]:
    """Both attention kernels, each shape beside FlashInfer's."""
    if importlib.util.find_spec("flashinfer") is None:
        raise ConfigError("--flashinfer needs the package flashinfer, which is not installed", field="flashinfer")
    from shared.kernels.attention.flashinfer import bench

    yield from bench.cases(device)


@dataclass(frozen=True)
class Goal:
    """What a kernel must reach at one shape."""

    op: str
    shape: str
    share: float  # of the measured limit


_HEADS = "32/8 heads of 128"
GOALS = (
    Goal("decode attention", f"64 × 4096 tokens, {_HEADS}, blocks of 16", 0.85),
    Goal("prefill attention", f"1 × 8192 of 8192 tokens, {_HEADS}, blocks of 16", 0.60),
    Goal("rms norm", "8192 × 4096", 0.85),
    Goal("add + rms norm", "8192 × 4096", 0.85),
    Goal("rotate + write", f"8192 tokens, {_HEADS}", 0.85),
    Goal("silu · mul", "8192 × 14336", 0.85),
    Goal("gather blocks", "512 × 2048 KiB", 0.85),
)
"""An H200 is to reach these."""


def verdicts(results: Iterable[Result]) -> list[str]:
    """A line for each goal whose case was measured."""
    by_case = {(r.op, r.shape): r.share for r in results}
    lines = []
    for goal in GOALS:
        share = by_case.get((goal.op, goal.shape))
        if share is not None:
            met = "met" if share >= goal.share else "missed"
            lines.append(f"{met}: {goal.op}, {goal.shape}: {share:.0%} of the limit, the goal is {goal.share:.0%}")
    return lines


def line(result: Result) -> str:
    """One case as it is printed when it is done."""
    return (
        f"{result.op}, {result.shape}: {result.time_us:,.1f} µs, {result.achieved:,.4g} {result.unit}, "
        f"{result.share:.0%} of the limit"
    )


def measure_each(
    cases: Iterable[Case], limits: Limits, clock: Clock, note: Callable[[list[Result]], None] = lambda _: None
) -> tuple[list[Result], list[str]]:
    """Measure the cases, print each one's line at once, and go on after one that raises.

    `note` is called with all results so far after each new one: a run that is cut off leaves what it had.

    Returns:
        (results, the names of the cases that failed). A failure's traceback is printed.
    """
    results: list[Result] = []
    failed: list[str] = []
    for case in cases:
        try:
            results.append(measure(case, limits, clock))
            print(line(results[-1]), flush=True)
            note(results)
        except Exception:
            failed.append(f"{case.op}, {case.shape}")
            print(f"failed: {failed[-1]}\n{traceback.format_exc()}", flush=True)
    return results, failed


def rows(results: Iterable[Result], limits: Limits) -> list[figures.Result]:
    """The limits, then the results, in the form of all benchmarks."""
    measured = [
        figures.Result(f"{r.op}, {r.shape}", r.achieved, r.unit, r.achieved / r.share, r.share) for r in results
    ]
    return limit_results(limits) + measured


def main(
    only: Annotated[str, Option("ops whose name contains this")] = "",
    tune: Annotated[bool, Option("attention over its possible tile sizes instead")] = False,
    flashinfer: Annotated[bool, Option("attention beside FlashInfer's instead")] = False,
    out: Out = None,
) -> None:
    """Measure the Triton kernels beside the limits of this GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("the kernel benchmark needs a CUDA device, and torch sees none")
    if tune and flashinfer:
        raise ConfigError("take either --tune or --flashinfer, not both", field="tune")
    device = torch.device("cuda")
    chosen = tuning_cases if tune else peer_cases if flashinfer else all_cases
    limits = measure_limits(graph_clock, device)
    print(figures.table(limit_results(limits)), flush=True)

    def note(results: list[Result]) -> None:
        if out is not None:
            figures.write(out, rows(results, limits))

    note([])
    cases = (case for case in chosen(device) if only in case.op)
    results, failed = measure_each(cases, limits, graph_clock, note)
    print("\n".join(["", *verdicts(results), *(f"failed: {name}" for name in failed)]), flush=True)
    if failed:
        sys.exit(1)
