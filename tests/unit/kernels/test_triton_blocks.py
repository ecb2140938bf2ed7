"""Triton's block copies and checksum against torch and the host's checksum, interpreted."""

from __future__ import annotations

import pytest
import torch

from . import block_checks as checks
from .conftest import Run


@pytest.mark.parametrize(
    ("num_blocks", "block_shape", "block_ids", "dtype"),
    [
        (9, (2, 2, 2, 16, 40), [3, 0, 8], torch.float32),
        (9, (2, 2, 2, 16, 40), [3, 0, 8, 1, 2], torch.bfloat16),
        (5, (2, 2, 2, 16, 300), [4, 1, 0, 0, 2, 4], torch.float32),  # several stretches; repeated ids
        (3, (4,), [2], torch.float16),  # one word
        (3, (2, 2, 1, 16, 64), [], torch.float32),
    ],
)
def test_blocks_are_copied_and_checked_bit_for_bit(
    interpreted: Run, num_blocks: int, block_shape: tuple[int, ...], block_ids: list[int], dtype: torch.dtype
) -> None:
    interpreted(checks.check_blocks, num_blocks, block_shape, block_ids, dtype=dtype)
