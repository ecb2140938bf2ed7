"""`python -m loadtest.bench.kernels.measure`: what each Triton kernel reaches of what this GPU can do.

Both limits are measured in the same run: memory by a large copy, arithmetic by a large matrix product. Every case
runs as a replayed CUDA graph on a cold cache, so neither Python nor the cache is part of a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest import figures
from shared.kernels.bench_case import Case


@dataclass(frozen=True)
class Limits:
    """What the device reaches, measured."""

    device: str
    bytes_per_s: float  # read plus written, by a copy
    flops_per_s: float  # bf16 matrix product


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    op: str
    shape: str
    time_us: float
    achieved: float  # GB/s or TFLOP/s
    unit: str
    share: float  # of the measured limit


Clock = Callable[[Callable[[], object]], float]
"""Seconds that one call takes on the device."""


def measure_limits(clock: Clock, device: torch.device) -> Limits:
    """Copy 2 GiB and multiply 8192² matrices of random numbers."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.nbytes / clock(lambda: target.copy_(source))
    size = 8192
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    flops_per_s = 2 * size**3 / clock(lambda: torch.matmul(left, right, out=product))
    return Limits(torch.cuda.get_device_name(device), bytes_per_s, flops_per_s)


def graph_clock(run: Callable[[], object]) -> float:
    """Median seconds of a replayed CUDA graph, the level 2 cache emptied before each."""
    from triton.testing import do_bench  # type: ignore[import-untyped, import-not-found, unused-ignore]

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=25, rep=150, return_mode="median")) / 1e3


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
    from shared.kernels.attention.prefill import bench as prefill
    from shared.kernels.blocks import bench as blocks
    from shared.kernels.rmsnorm import bench as rmsnorm
    from shared.kernels.rotary import bench as rotary
    from shared.kernels.sampling import bench as sampling

    for module in (decode, prefill, rmsnorm, rotary, activation, blocks, sampling):
        yield from module.cases(device)


def tuning_cases(device: torch.device) -> Iterator[Case]:
    """Both attention kernels over the sizes that they could be compiled for."""
    from shared.kernels.attention.decode import bench as decode
    from shared.kernels.attention.prefill import bench as prefill

    yield from decode.tuning_cases(device)
    yield from prefill.tuning_cases(device)


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


def rows(results: Iterable[Result], limits: Limits) -> list[figures.Result]:
    """The limits, then the results, in the form of all benchmarks."""
    found = [
        figures.Result(f"copy bandwidth, {limits.device}", limits.bytes_per_s / 1e9, "GB/s"),
        figures.Result(f"bf16 matmul, {limits.device}", limits.flops_per_s / 1e12, "TFLOP/s"),
    ]
    found += [figures.Result(f"{r.op}, {r.shape}", r.achieved, r.unit, r.achieved / r.share, r.share) for r in results]
    return found


def main() -> None:
    """Measure and print; `--tune` tries other tile sizes, `--out FILE` keeps the numbers."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.kernels", description=__doc__)
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--tune", action="store_true", help="attention over its possible tile sizes instead")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernel benchmark needs a CUDA device, and torch sees none")
    device = torch.device("cuda")
    limits = measure_limits(graph_clock, device)
    cases = tuning_cases(device) if arguments.tune else all_cases(device)
    results = [measure(case, limits, graph_clock) for case in cases if arguments.only in case.op]
    print(figures.table(rows(results, limits)))
    print("\n".join(["", *verdicts(results)]))
    if arguments.out:
        figures.write(arguments.out, rows(results, limits))


if __name__ == "__main__":
    main()
