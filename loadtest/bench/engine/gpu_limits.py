"""`python -m loadtest.bench gpu-limits`: versions, the GPU's properties, and what a copy and a matrix product reach."""

from __future__ import annotations

import platform

import torch

from loadtest.bench.kernels.limits import graph_clock, limit_results, measure_limits
from loadtest.figures import Result, table, write
from loadtest.plain_options import Out
from shared.errors import ConfigError


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
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a CUDA device, and torch sees none")
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]

    device = torch.device("cuda")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"Triton {triton.__version__}, {torch.cuda.get_device_name(device)}\n", flush=True)
    results = device_results(device)
    with torch.inference_mode():
        results += limit_results(measure_limits(graph_clock, device))
    print(table(results))
    if out is not None:
        write(out, results)
