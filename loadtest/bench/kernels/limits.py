"""Limits of a GPU: a large copy or sum, a large matrix product; alone with `python -m loadtest.bench gpu-limits`."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loadtest.rig.command_line import Out
from loadtest.rig.results import Report, Result
from shared.errors import ConfigError

Clock = Callable[[Callable[[], object]], float]
"""Seconds that one call takes on the device."""


@dataclass(frozen=True)
class Limits:
    """What the device reaches, measured."""

    device: str
    bytes_per_s: float  # read by a sum, or read plus written by a copy: whichever is more
    flops_per_s: float  # bf16 matrix product

    def least_s(self, num_bytes: float, num_flops: float) -> float:
        """Seconds to move the bytes or to compute the products, whichever takes longer."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def cuda_device(what: str, otherwise: str = "") -> torch.device:
    """The current GPU. Raises ConfigError where there is none: `what` needs it, and `otherwise` ends the message."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{what} needs a CUDA device, and torch sees none{otherwise}")
    return torch.device("cuda")


def measure_limits(clock: Clock, device: torch.device) -> Limits:
    """Copy and read 2 GiB and multiply 8192² matrices of random numbers."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / clock(lambda: target.copy_(source))
    # A step reads far more than it writes, which memory does faster than both in turns.
    numbers = source.view(torch.int32)
    read = source.nbytes / clock(lambda: torch.amax(numbers))
    size = 8192
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    flops_per_s = 2 * size**3 / clock(lambda: torch.matmul(left, right, out=product))
    return Limits(torch.cuda.get_device_name(device), max(copied, read), flops_per_s)


def graph_clock(run: Callable[[], object]) -> float:
    """Median seconds of the call within a replayed CUDA graph, the level 2 cache full of what is read before it.

    The graph itself notes when the call begins and ends, so that its launch is no part of the time. What empties the
    cache only reads: a cache that must be written back first would be the call's cost.
    """
    other = torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    begin, end = (
        torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call, unused-ignore]
        for _ in range(2)
    )
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.amax(other)
        begin.record()
        run()
        end.record()
    times: list[float] = []
    while len(times) < 5 or (len(times) < 300 and sum(times) < 50):
        graph.replay()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / 1e3


def limit_results(limits: Limits) -> list[Result]:
    """The limits in the form of all benchmarks."""
    return [
        Result(f"memory bandwidth, {limits.device}", limits.bytes_per_s / 1e9, "GB/s"),
        Result(f"bf16 matmul, {limits.device}", limits.flops_per_s / 1e12, "TFLOP/s"),
    ]


def device_results(device: torch.device) -> list[Result]:
    """What kernels' sizes depend on."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
    return [
        Result("compute capability", properties.major + properties.minor / 10, ""),
        Result("multiprocessors", properties.multi_processor_count, ""),
        Result("shared memory of a thread block, at most", shared_bytes / 1024, "KiB"),
        Result("memory", properties.total_memory / (1 << 30), "GiB"),
    ]


def main(out: Out = None) -> None:
    """Measure a GPU's limits."""
    device = cuda_device("this benchmark")
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]

    print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"Triton {triton.__version__}, {torch.cuda.get_device_name(device)}\n", flush=True)
    report = Report(out)
    report.add(device_results(device))
    with torch.inference_mode():
        report.add(limit_results(measure_limits(graph_clock, device)))
    report.print()
