"""Every Triton kernel compiled for compute capability 9.0, as far as that shows without such a device."""

from __future__ import annotations

import pytest
import torch

from . import compiling
from .compiling import SHARED_MEMORY_BYTES, Compiled
from .conftest import Run

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]


def by_name(kernels: list[Compiled]) -> dict[str, list[Compiled]]:
    return {name: [kernel for kernel in kernels if kernel.name == name] for name in {k.name for k in kernels}}


def test_attention_of_an_8b_model_uses_the_matrix_units_and_spills_nothing(compiled: Run) -> None:
    kernels = compiled(compiling.compile_attention, 128, 4, 16, None, torch.bfloat16)
    named = by_name(kernels)
    assert set(named) == {"decode_parts", "merge_parts", "prefill_tiles"}
    assert all(kernel.stack_bytes == 0 for kernel in kernels)
    (decode,) = named["decode_parts"]
    assert decode.num_matrix_instructions > 0
    assert decode.num_async_copies > 0
    assert 3 * decode.shared_bytes <= SHARED_MEMORY_BYTES  # three parts side by side
    for prefill in named["prefill_tiles"]:
        assert prefill.num_wide_matrix_instructions > 0
        assert prefill.num_async_copies > 0
        assert prefill.shared_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window", "dtype"),
    [
        (64, 1, 32, None, torch.bfloat16),
        (80, 3, 16, 1000, torch.bfloat16),
        (96, 16, 64, None, torch.float16),
        (128, 7, 16, 1000, torch.bfloat16),
        (128, 4, 16, None, torch.float32),
        (256, 2, 32, None, torch.bfloat16),
        (256, 2, 32, 1000, torch.float32),
    ],
)
def test_attention_of_every_head_size_compiles_and_fits(
    compiled: Run, head_dim: int, group: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    kernels = compiled(compiling.compile_attention, head_dim, group, block_size, window, dtype)
    assert set(by_name(kernels)) == {"decode_parts", "merge_parts", "prefill_tiles"}
    assert all(kernel.shared_bytes <= SHARED_MEMORY_BYTES for kernel in kernels)


def test_attention_over_narrow_kv_compiles_and_fits(compiled: Run) -> None:
    kernels = compiled(compiling.compile_attention, 128, 4, 16, None, torch.float32, torch.bfloat16)
    assert set(by_name(kernels)) == {"decode_parts", "merge_parts", "prefill_tiles"}
    assert all(kernel.shared_bytes <= SHARED_MEMORY_BYTES for kernel in kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_other_kernels_compile_without_spills(compiled: Run, dtype: torch.dtype) -> None:
    kernels = compiled(compiling.compile_the_rest, dtype)
    assert set(by_name(kernels)) == {
        "rms_norm_rows", "silu_mul_tiles", "rotate_and_write_heads", "copy_blocks", "checksum_stretches", "sample_rows",
    }  # fmt: skip
    assert all(kernel.stack_bytes == 0 for kernel in kernels)
