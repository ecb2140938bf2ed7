"""Triton's kernels compiled ahead of time for several GPUs: registers, shared memory and instructions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import pytest
import torch

from . import compiling
from .compiling import TARGETS, Compiled
from .conftest import Run

pytestmark = pytest.mark.slow

ATTENTION = {"plan_decode_items", "decode_parts", "plan_prefill_items", "prefill_tiles"}
THE_REST = {
    "rms_norm_rows", "act_and_mul_tiles", "rotate_and_write_heads", "copy_blocks", "checksum_stretches", "find_peaks",
    "key_sum_stretches",
    "measure_levels", "refine_levels", "place_ranges", "race_and_collect", "choose_tokens", "mask_rows",
    "penalize_rows",
    "count_chosen", "choose_of_token", "place_latents",
}  # fmt: skip
MATRIX_INSTRUCTIONS = {
    "sm_80": "mma.sync",
    "sm_86": "mma.sync",
    "sm_89": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "sm_120": "mma.sync",
    "gfx942": "v_mfma",
}
SIDE_BY_SIDE = {"sm_80": 2, "sm_90": 3, "sm_100": 3}
"""Parts of a decode that share a multiprocessor."""
FEW_BYTES = 72  # of stack: the most that wide heads or a window spill
OF_COMMON_MODELS = {"sm_100": {"prefill_tiles": 16}}
"""Bytes that attention may spill there: steps of 64 keys, faster on an H200, are given 128 registers on sm_100."""
ON_THE_STACK = {"sm_80": {"rotate_and_write_heads": 8}, "sm_89": {"rotate_and_write_heads": 8}}
"""Bytes, by kernel: where heads are normed, ptxas keeps to 40 registers, with which 48 warps of a multiprocessor have
room, and puts two more values there; on sm_80 in float16 alone."""


SPILLS_CODES = ("sm_80", "sm_100")
"""Where the tiles of long prompts have no registers left to open codes in."""
ON_THE_STACK_OF_3_6 = {"sm_90": {"decode_parts": 8}}
"""Of attention with Triton 3.6, which keeps to 80 registers there as later ones do and finds one value too many."""


def attention_on_the_stack(arch: str) -> Mapping[str, int]:
    """Bytes that attention's kernels may spill, by kernel, with the Triton that is installed."""
    return ON_THE_STACK_OF_3_6.get(arch, {}) if version("triton").startswith("3.6.") else {}


def by_name(kernels: list[Compiled]) -> dict[str, list[Compiled]]:
    return {name: [kernel for kernel in kernels if kernel.name == name] for name in {k.name for k in kernels}}


def assert_attention_fits(kernels: list[Compiled], arch: str) -> None:
    assert set(by_name(kernels)) == ATTENTION
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels)


def assert_nothing_spills(kernels: list[Compiled], allowed: Mapping[str, int] = MappingProxyType({})) -> None:
    """`allowed`: bytes of stack, by kernel."""
    spilling = [k for k in kernels if k.spilled_registers or k.stack_bytes > allowed.get(k.name, 0)]
    assert [(kernel.name, kernel.stack_bytes, kernel.spilled_registers) for kernel in spilling] == []


@pytest.mark.parametrize("arch", TARGETS)
def test_attention_of_an_8b_model_uses_the_matrix_units_and_spills_nothing(compiled: Run, arch: str) -> None:
    kernels = compiled(compiling.compile_attention, 128, 4, 16, None, torch.bfloat16, arch=arch)
    assert_attention_fits(kernels, arch)
    assert_nothing_spills(kernels, attention_on_the_stack(arch))
    named = by_name(kernels)
    (decode,) = named["decode_parts"]
    assert decode.num_matrix_instructions > 0
    assert SIDE_BY_SIDE.get(arch, 1) * decode.shared_bytes <= TARGETS[arch].shared_bytes
    for prefill in named["prefill_tiles"]:
        assert MATRIX_INSTRUCTIONS[arch] in prefill.code
    assert len(named["prefill_tiles"]) == 2
    if not TARGETS[arch].is_amd:
        assert all(kernel.num_async_copies > 0 for kernel in (decode, *named["prefill_tiles"]))
        # The ticket of a sequence's parts: released after all threads' stores, acquired before the merge's loads.
        assert decode.code.count("atom.global.gpu.acq_rel.add") + decode.code.count("atom.acq_rel.gpu.global.add") == 1


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"),
    [
        (64, 4, 16, torch.bfloat16),
        (128, 1, 16, torch.bfloat16),
        (128, 4, 16, torch.float16),
        (128, 8, 32, torch.bfloat16),
    ],
)
def test_attention_of_the_common_models_spills_nothing(
    compiled: Run, head_dim: int, group: int, block_size: int, dtype: torch.dtype, arch: str
) -> None:
    kernels = compiled(compiling.compile_attention, head_dim, group, block_size, None, dtype, arch=arch)
    assert_attention_fits(kernels, arch)
    assert_nothing_spills(kernels, OF_COMMON_MODELS.get(arch, {}))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 4, None), (128, 4, None), (128, 8, 1000)])
def test_attention_to_codes_uses_the_matrix_units_and_fits(
    compiled: Run, head_dim: int, group: int, window: int | None, kv_dtype: torch.dtype, arch: str
) -> None:
    kernels = compiled(
        compiling.compile_attention, head_dim, group, 16, window, torch.bfloat16, arch=arch, kv_dtype=kv_dtype
    )
    assert_attention_fits(kernels, arch)
    (decode,) = by_name(kernels)["decode_parts"]
    assert decode.num_matrix_instructions > 0
    assert all(MATRIX_INSTRUCTIONS[arch] in prefill.code for prefill in by_name(kernels)["prefill_tiles"])
    spilling = [kernel.name for kernel in kernels if kernel.stack_bytes > FEW_BYTES]
    assert spilling in ([], ["prefill_tiles"] if arch in SPILLS_CODES else [])


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
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
    compiled: Run, head_dim: int, group: int, block_size: int, window: int | None, dtype: torch.dtype, arch: str
) -> None:
    kernels = compiled(compiling.compile_attention, head_dim, group, block_size, window, dtype, arch=arch)
    assert_attention_fits(kernels, arch)
    if dtype != torch.float32 and head_dim in (64, 128, 256):  # fp32 serves tests of exactness, other heads are rare
        assert [(kernel.name, kernel.stack_bytes) for kernel in kernels if kernel.stack_bytes > FEW_BYTES] == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize(
    ("head_dim", "group", "queries"), [(128, 4, 2), (128, 4, 4), (128, 4, 16), (128, 8, 8), (64, 8, 8), (256, 2, 16)]
)
def test_attention_of_steps_with_guesses_uses_the_matrix_units_and_spills_little(
    compiled: Run, head_dim: int, group: int, queries: int, arch: str
) -> None:
    kernels = compiled(
        compiling.compile_attention, head_dim, group, 16, None, torch.bfloat16, arch=arch, queries=queries
    )
    assert set(by_name(kernels)) == {"plan_decode_items", "decode_parts"}
    (decode,) = by_name(kernels)["decode_parts"]
    assert decode.num_matrix_instructions > 0
    assert decode.shared_bytes <= TARGETS[arch].shared_bytes
    assert decode.stack_bytes <= (0 if arch == "sm_90" and head_dim <= 128 else FEW_BYTES)


def test_attention_over_narrow_kv_compiles_and_fits(compiled: Run) -> None:
    kernels = compiled(compiling.compile_attention, 128, 4, 16, None, torch.float32, torch.bfloat16)
    assert_attention_fits(kernels, "sm_90")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("head_dim", "group", "scoring"),
    [(64, 8, {"has_sinks": True}), (256, 2, {"softcap": 50.0}), (128, 5, {"is_chunked": True})],
    ids=["sinks", "softcap", "chunks"],
)
def test_attention_with_bounds_of_scores_and_sinks_compiles_and_fits(
    compiled: Run, head_dim: int, group: int, scoring: dict[str, Any], arch: str
) -> None:
    kernels = compiled(compiling.compile_attention, head_dim, group, 16, 128, torch.bfloat16, arch=arch, **scoring)
    assert_attention_fits(kernels, arch)


def test_a_rank_with_one_kv_head_is_served(compiled: Run) -> None:
    kernels = compiled(compiling.compile_single_heads, torch.bfloat16)
    assert {"rotate_and_write_heads", "decode_parts", "prefill_tiles"} <= {kernel.name for kernel in kernels}


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_other_kernels_compile_without_spills(compiled: Run, dtype: torch.dtype, arch: str) -> None:
    kernels = compiled(compiling.compile_the_rest, dtype, arch)
    has_few = arch == "sm_90" and dtype != torch.float32  # elsewhere torch multiplies
    assert set(by_name(kernels)) == THE_REST | ({"multiply_few"} if has_few else set())
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels)
    assert_nothing_spills(kernels, ON_THE_STACK.get(arch, {}))
