"""Triton's grouped products of experts against the torch reference, interpreted, and compiled ahead of time."""

from __future__ import annotations

import pytest
import torch

from . import compiling
from . import decoder_checks as checks
from .compiling import TARGETS
from .conftest import Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 4, 1), (1, 6, 6), (7, 5, 2), (33, 16, 3), (90, 3, 2)]
)
def test_experts_equal_the_reference(
    interpreted: Run, num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype
) -> None:
    interpreted(checks.check_experts, num_tokens, num_experts, top_k, dtype=dtype)


@pytest.mark.parametrize("sizes", [(20, 12), (130, 70)])
def test_experts_of_sizes_that_fill_no_tile_equal_the_reference(interpreted: Run, sizes: tuple[int, int]) -> None:
    interpreted(checks.check_experts, 9, 5, 2, sizes=sizes)


@pytest.mark.parametrize("part", [(0, 3), (3, 4), (4, 7)])
def test_a_range_of_experts_counts_the_others_as_zero(interpreted: Run, part: tuple[int, int]) -> None:
    interpreted(checks.check_experts, 20, 7, 3, part=part)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_compile_and_use_the_matrix_units_without_spills(compiled: Run, arch: str, dtype: torch.dtype) -> None:
    kernels = compiled(compiling.compile_experts, dtype, arch)
    assert {kernel.name for kernel in kernels} == {"gate_up_tiles", "down_tiles", "combine_tiles"}
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels)
    assert [(kernel.name, kernel.stack_bytes, kernel.spilled_registers) for kernel in kernels if kernel.spills] == []
    if dtype == torch.bfloat16:
        products = [kernel for kernel in kernels if kernel.name != "combine_tiles"]
        assert len(products) == 4
        assert all(kernel.num_matrix_instructions > 0 for kernel in products)
