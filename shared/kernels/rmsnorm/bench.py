"""RMS norm: how fast rows pass through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shared.kernels.bench_case import Case
from shared.kernels.rmsnorm.launch import add_rms_norm, rms_norm

SHAPES = ((64, 4096), (8192, 4096), (32_768, 4096), (8192, 8192))


def cases(device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Case]:
    """With and without the residual, at each (num_tokens, size)."""
    for num_tokens, size in shapes:
        x, residual = (torch.randn(num_tokens, size, device=device).bfloat16() for _ in range(2))
        weight = torch.randn(size, device=device).bfloat16()
        label = f"{num_tokens} × {size}"

        def alone(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            rms_norm(x, weight, 1e-5)

        def added(x: torch.Tensor = x, residual: torch.Tensor = residual, weight: torch.Tensor = weight) -> None:
            add_rms_norm(x, residual, weight, 1e-5)

        yield Case("rms norm", label, alone, 2 * x.nbytes)
        yield Case("add + rms norm", label, added, 4 * x.nbytes)
