"""The deterministic Triton kernels, interpreted: a row is the same to the bit in every batch. Compiled: one of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.model.checkpoints import write_random_checkpoint

from . import deterministic_checks as checks
from .compiling import TARGETS
from .conftest import Run

WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_size", "out_size", "dtype"),
    [(64, 96, torch.float32), (72, 35, torch.float32), (300, 64, torch.float32), (96, 70, torch.float16)],
)
def test_a_row_of_a_product_does_not_depend_on_how_many_there_are(
    interpreted: Run, in_size: int, out_size: int, dtype: torch.dtype
) -> None:
    interpreted(checks.check_product, in_size, out_size, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuts", "window", "dtype"),
    [
        ([0, 1, 2, 3, 60], None, torch.float32),
        ([0, 16, 32, 48, 60], None, torch.float32),
        ([0, 31, 32, 59, 60], 17, torch.float32),
        ([0, 25, 59, 60], None, torch.float16),
        ([0, 7, 8, 60], 20, torch.float16),
    ],
)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_chunks_and_mates_do_not_change_a_token(
    interpreted: Run, cuts: list[int], window: int | None, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    interpreted(checks.check_attention, cuts, window, dtype, heads=heads, head_dim=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "extra", "dtype"),
    [
        ("LlamaForCausalLM", {}, torch.float32),
        ("Qwen3ForCausalLM", WINDOWED, torch.float32),
        ("LlamaForCausalLM", {}, torch.float16),
    ],
)
def test_logits_are_the_same_in_every_cut_and_company(
    interpreted: Run, tmp_path: Path, architecture: str, extra: dict[str, Any], dtype: torch.dtype
) -> None:
    write_random_checkpoint(
        tmp_path, architecture, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, extra_config=extra
    )
    interpreted(checks.check_logits, tmp_path, dtype, [[0, 17, 18, 24], [0, 1, 2, 3, 24]], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch",
    [
        "sm_80",
        "sm_90",
        "sm_100",
        "gfx942",
    ],
)
def test_prompts_and_answers_take_one_kernel_of_each_kind(compiled: Run, arch: str) -> None:
    """Two would be two orders of sums."""
    kernels = compiled(checks.compile_all, torch.bfloat16, arch)
    assert sorted(kernel.name for kernel in kernels) == ["multiply_tiles", "plan_prefill_items", "prefill_tiles"]
    assert [(kernel.name, kernel.stack_bytes) for kernel in kernels if kernel.stack_bytes] == []
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels)
    assert all(kernel.num_matrix_instructions > 0 for kernel in kernels if kernel.name != "plan_prefill_items")
