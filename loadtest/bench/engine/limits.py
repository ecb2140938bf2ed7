"""The processor's limits, measured: reading memory, multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

_BUFFER_BYTES = 512 * 1024 * 1024
_MATRIX_SIZE = 2048


def timed(action: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    """Median of several runs, seconds."""
    for _ in range(warmup):
        action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times)


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes a second of a streaming read by all of torch's threads."""
    buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32)
    return _BUFFER_BYTES / timed(buffer.sum, repeats)


def matmul_rate(repeats: int = 5) -> float:
    """FLOP/s of the best square product, over the dtypes that a bf16 or fp32 model may compute in."""
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(_MATRIX_SIZE, _MATRIX_SIZE).to(dtype)
        rates.append(2 * _MATRIX_SIZE**3 / timed(lambda a=a: a @ a, repeats))  # type: ignore[misc]
    return max(rates)
