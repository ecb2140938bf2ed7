"""Triton's attention to latents against the formula, interpreted, and compiled ahead of time."""

from __future__ import annotations

import pytest
import torch

from . import attention_checks as checks
from . import compiling
from .compiling import TARGETS
from .conftest import Run

pytestmark = pytest.mark.slow

FEW_BYTES = 64  # of stack: sm_80 spills 40, the others none


@pytest.mark.parametrize(
    ("num_heads", "dim", "plan"),
    [
        (3, 20, [(1, 1), (1, 17), (5, 9)]),
        (16, 48, [(1, 40), (3, 3), (1, 16)]),
        (21, 32, [(1, 33), (2, 70)]),
        (5, 576, [(1, 50)]),
    ],
)
def test_attention_to_latents_follows_the_formula(
    interpreted: Run, num_heads: int, dim: int, plan: list[tuple[int, int]]
) -> None:
    interpreted(checks.check_latents, plan, num_heads=num_heads, dim=dim)


@pytest.mark.parametrize("num_heads", [4, 18])
def test_parts_of_a_sequence_are_merged(interpreted: Run, num_heads: int) -> None:
    interpreted(checks.check_latents, [(1, 130), (1, 5), (1, 64), (2, 90)], num_heads=num_heads, dim=24, tile=16)


def test_latents_may_be_kept_in_fewer_bits(interpreted: Run) -> None:
    interpreted(checks.check_latents, [(1, 30)], num_heads=2, dim=40, kv_dtype=torch.bfloat16)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_attention_to_latents_compiles_and_uses_the_matrix_units(compiled: Run, num_heads: int, arch: str) -> None:
    kernels = compiled(compiling.compile_latents, num_heads, torch.bfloat16, arch)
    (attend,) = (kernel for kernel in kernels if kernel.name == "latent_parts")
    assert attend.shared_bytes <= TARGETS[arch].shared_bytes
    assert attend.num_matrix_instructions > 0
    assert attend.stack_bytes <= FEW_BYTES
    assert attend.spilled_registers == 0
