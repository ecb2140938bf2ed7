"""Triton's norms, activation, rotation and KV write against the torch reference, interpreted."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from . import decoder_checks
from .conftest import Run

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
"""The interpreter cuts bf16 off instead of rounding it: once or twice stays within the tolerance, not more often."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (3, 1000), (1, 4096), (0, 64), (4, 3, 80)])
def test_rms_norm_equals_the_reference(interpreted: Run, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    interpreted(decoder_checks.check_rms_norm, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 64), (2, 5000), (1, 1), (0, 64)])
def test_silu_mul_equals_the_reference(interpreted: Run, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    interpreted(decoder_checks.check_silu_mul, num_tokens, size, dtype=dtype)


@pytest.mark.parametrize(
    ("head_dim", "heads", "block_size", "norms", "dtype"),
    [
        (64, (4, 2), 16, False, torch.float32),
        (80, (3, 1), 32, True, torch.float16),
        (96, (8, 8), 16, False, torch.float16),
        (128, (40, 2), 64, True, torch.float32),
        (256, (5, 1), 16, False, torch.bfloat16),
    ],
)
def test_rotate_and_write_equals_the_reference(
    interpreted: Run,
    head_dim: int,
    heads: tuple[int, int],
    block_size: int,
    norms: bool,
    dtype: torch.dtype,
) -> None:
    interpreted(
        decoder_checks.check_rotate_and_write,
        num_tokens=3,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        norms=norms,
        dtype=dtype,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_shape_rotated_and_written_equals_the_reference(
    interpreted: Run, head_dim: int, dtype: torch.dtype
) -> None:
    for group, block_size, norms in product([1, 3, 4, 16], [16, 32, 64], [False, True]):
        interpreted(
            decoder_checks.check_rotate_and_write,
            num_tokens=3,
            heads=(2 * group, 2),
            head_dim=head_dim,
            block_size=block_size,
            norms=norms,
            dtype=dtype,
        )


def test_no_tokens_are_rotated_without_harm(interpreted: Run) -> None:
    interpreted(
        decoder_checks.check_rotate_and_write, num_tokens=0, heads=(4, 2), head_dim=64, block_size=16, norms=True
    )


def test_tokens_with_a_negative_slot_are_not_written(interpreted: Run) -> None:
    interpreted(decoder_checks.check_negative_slots_are_not_written)
