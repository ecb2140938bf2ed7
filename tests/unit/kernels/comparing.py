"""What the checks of Triton's ops have in common: the kernels, random tensors, and how near is near enough.

Only functions that are called in the right process import triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shared.kernels.backends.triton import TritonKernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def triton_kernels() -> TritonKernels:
    from shared.kernels.backends.triton import TritonKernels

    return TritonKernels()


def random_tensor(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Within the tolerance of actual's dtype, absolute and relative; NaN never passes."""
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)
