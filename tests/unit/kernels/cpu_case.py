"""Random tensors for the C++ kernels, and how near their results must lie."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


def uneven_weight() -> torch.Tensor:
    """[96, 1040] bf16: a few weights far larger or smaller than the others."""
    weight = random(96, 1040, dtype=torch.bfloat16)
    places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(1))
    weight.view(-1)[places[:150]] *= 1e6
    weight.view(-1)[places[150:300]] *= 1e-12
    for output, column in ((0, 0), (31, 511), (0, 512), (63, 1039)):  # ends of panels, and of what is opened at a time
        weight[output, column] = 1e9
    return weight
