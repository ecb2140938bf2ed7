"""Triton's ops of experts, latents, blocks, sampling and elements against the references."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from shared.kernels.activation.activations import GELU, Activation

from . import attention_checks, block_checks, compiling, decoder_checks, delta_checks, sampling_checks
from .compiling import TARGETS
from .conftest import Run
from .delta_checks import CHUNKS, ONES
from .routing_case import FAMILIES, ROUTINGS


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
    interpreted(block_checks.check_blocks, num_blocks, block_shape, block_ids, dtype=dtype)


@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size"), [(1, 1024, 256), (7, 512, 128), (32, 256, 384), (50, 256, 256)]
)
def test_products_of_few_rows_equal_the_exact_ones(
    interpreted: Run, num_rows: int, in_size: int, out_size: int
) -> None:
    interpreted(decoder_checks.check_few_rows, num_rows, in_size, out_size, dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 4, 1), (1, 6, 6), (7, 5, 2), (33, 16, 3), (90, 3, 2)]
)
def test_experts_equal_the_reference(
    interpreted: Run, num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype
) -> None:
    interpreted(decoder_checks.check_experts, num_tokens, num_experts, top_k, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(20, 12), (130, 70)])
def test_experts_of_sizes_that_fill_no_tile_equal_the_reference(interpreted: Run, sizes: tuple[int, int]) -> None:
    interpreted(decoder_checks.check_experts, 9, 5, 2, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("part", [(0, 3), (3, 4), (4, 7)])
def test_a_range_of_experts_counts_the_others_as_zero(interpreted: Run, part: tuple[int, int]) -> None:
    interpreted(decoder_checks.check_experts, 20, 7, 3, part=part)


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "part"), [(40, (0, 5)), (40, (2, 5)), (0, (0, 5))])
def test_torchs_grouped_product_of_experts_equals_the_reference(
    interpreted: Run, num_tokens: int, part: tuple[int, int]
) -> None:
    interpreted(decoder_checks.check_torchs_product, num_tokens, 5, 2, sizes=(32, 24), part=part)


@pytest.mark.slow
@pytest.mark.parametrize("first_expert", [0, 2])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 3, 2), (40, 7, 3), (130, 20, 4), (200, 128, 8)])
def test_both_ways_to_sort_pairs_agree(
    interpreted: Run, num_tokens: int, num_experts: int, top_k: int, first_expert: int
) -> None:
    interpreted(decoder_checks.check_sorted_pairs, num_tokens, num_experts, top_k, first_expert)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_compile_and_use_the_matrix_units_without_spills(compiled: Run, arch: str, dtype: torch.dtype) -> None:
    kernels = compiled(compiling.compile_experts, dtype, arch)
    names = {kernel.name for kernel in kernels}
    assert names == {"gate_up_tiles", "down_tiles", "combine_tiles", "sort_pairs_here"}
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels)
    assert [(kernel.name, kernel.stack_bytes, kernel.spilled_registers) for kernel in kernels if kernel.spills] == []
    if dtype == torch.bfloat16:
        products = [kernel for kernel in kernels if kernel.name in ("gate_up_tiles", "down_tiles")]
        assert len(products) == (6 if arch == "sm_90" else 4)
        assert all(kernel.num_matrix_instructions > 0 for kernel in products)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ROUTINGS, *FAMILIES])
def test_experts_are_chosen_as_the_reference_chooses(interpreted: Run, name: str) -> None:
    interpreted(decoder_checks.check_choices, (name,))


@pytest.mark.slow
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "dims", "dtype", "kv_dtype"),
    [
        (5, 3, (48, 20, 32), torch.float32, None),
        (4, 17, (512, 128, 64), torch.float16, None),
        (3, 2, (40, 0, 6), torch.float32, torch.bfloat16),
        (1, 1, (16, 8, 2), torch.bfloat16, None),
        (0, 4, (16, 8, 4), torch.float32, None),
    ],
)
def test_latents_are_placed_as_by_torch(
    interpreted: Run,
    num_tokens: int,
    num_heads: int,
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    is_interleaved: bool,
) -> None:
    interpreted(
        decoder_checks.check_placed_latents,
        num_tokens=num_tokens,
        num_heads=num_heads,
        dims=dims,
        is_interleaved=is_interleaved,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


FEW_BYTES = 64  # of stack: sm_80 spills 40, the others none
AFTER_THE_LOOP = 640  # of stack, where 64 heads share the rows: Triton 3.6 spills 56, 3.9 spills sums that are stored


@pytest.mark.slow
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
    interpreted(attention_checks.check_latents, plan, num_heads=num_heads, dim=dim)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "heads"), [(4, 16), (18, 16), (70, 64)])
def test_parts_of_a_sequence_are_merged(interpreted: Run, num_heads: int, heads: int) -> None:
    plan = [(1, 130), (1, 5), (1, 64), (2, 90)]
    interpreted(attention_checks.check_latents, plan, num_heads=num_heads, dim=24, tile=16, heads=heads)


@pytest.mark.slow
def test_latents_may_be_kept_in_fewer_bits(interpreted: Run) -> None:
    interpreted(attention_checks.check_latents, [(1, 30)], num_heads=2, dim=40, kv_dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_attention_to_latents_compiles_and_uses_the_matrix_units(compiled: Run, num_heads: int, arch: str) -> None:
    kernels = compiled(compiling.compile_latents, num_heads, torch.bfloat16, arch)
    (attend,) = (kernel for kernel in kernels if kernel.name == "latent_parts")
    assert attend.shared_bytes <= TARGETS[arch].shared_bytes
    assert attend.num_matrix_instructions > 0
    assert attend.stack_bytes <= (AFTER_THE_LOOP if (arch, num_heads) == ("sm_90", 128) else FEW_BYTES)
    assert attend.spilled_registers == 0


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (ONES + CHUNKS[:2], {}),
        (ONES, {"heads": (1, 3), "dims": (5, 7), "kernel_size": 3, "words": 37, "dtype": torch.float16}),
        (ONES[1:3] + CHUNKS[:2], {"heads": (2, 4), "words": 108, "parts": 2, "runs": 3}),
        (ONES[1:] + CHUNKS[:4], {"heads": (2, 2), "by_channel": True}),
        ([(1, 1), (20, 21)], {"kernel_size": 1, "words": 48}),  # rows of matrices lie in one block each
        *(
            pytest.param(plan, sizes, marks=pytest.mark.slow)
            for plan, sizes in (
                (CHUNKS, {}),
                (ONES + CHUNKS[:4], {"kernel_size": 2, "words": 4096, "number": 0, "dtype": torch.float16}),
                (ONES + CHUNKS[:4], {"dims": (20, 130), "heads": (1, 2)}),  # a matrix in several programs
                (ONES + CHUNKS[:4], {"heads": (3, 6), "dims": (8, 16), "words": 192, "parts": 3, "runs": 4}),
                (ONES + CHUNKS, {"dims": (20, 70), "heads": (3, 3), "by_channel": True, "dtype": torch.float16}),
                (ONES + CHUNKS[:2], {"dims": (130, 8), "heads": (1, 1)}),  # left to torch
            )
        ),
    ],
)
def test_the_gated_delta_rule_equals_the_reference(
    interpreted: Run, plan: list[tuple[int, int]], sizes: dict[str, Any]
) -> None:
    interpreted(delta_checks.check_triton, plan, **sizes)


SPILLS_COLUMNS = 128  # of stack, in 16 bits, on sm_90 and sm_100
SPILLS_CHANNELS = 512  # likewise by channel, where there is an exponential for each element


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_gated_delta_rule_compiles_and_uses_the_matrix_units(
    compiled: Run, arch: str, dtype: torch.dtype, by_channel: bool
) -> None:
    found = compiled(compiling.compile_delta, dtype, arch, by_channel=by_channel)
    kernels = {kernel.name: kernel for kernel in found}
    assert set(kernels) - {"fade_chunks"} == {
        "convolve_ones", "step_heads", "convolve_tokens", "keep_tails", "solve_chunks", "pass_chunks", "norm_heads",
    }  # fmt: skip
    assert ("fade_chunks" in kernels) == by_channel
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels.values())
    assert all(kernels[name].num_matrix_instructions > 0 for name in ("solve_chunks", "pass_chunks"))
    narrow = SPILLS_CHANNELS if by_channel else SPILLS_COLUMNS
    most = (narrow, narrow) if dtype == torch.bfloat16 else (4096, 2048)
    allowed = dict(zip(("pass_chunks", "solve_chunks"), most, strict=True))
    spilling = [k for k in kernels.values() if k.spilled_registers or k.stack_bytes > allowed.get(k.name, 0)]
    assert [(kernel.name, kernel.stack_bytes, kernel.spilled_registers) for kernel in spilling] == []


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "seed"), [(8, 100, 0), (8, 100, 1), (6, 3000, 2), (4, 5000, 3), (3, 1, 4), (0, 9, 5)]
)
def test_tokens_equal_those_of_the_reference(
    interpreted: Run, num_rows: int, vocab_size: int, seed: int, ties: bool
) -> None:
    interpreted(sampling_checks.check_sampling, num_rows, vocab_size, seed, ties=ties)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_tokens_equal_those_of_the_reference(interpreted: Run, seed: int) -> None:
    for vocab_size, ties in ((300, False), (300, True), (2049, seed % 2 == 0)):
        interpreted(sampling_checks.check_sampling, 24, vocab_size, 100 + seed, ties=ties)
        sizes = {"capacity": 32 << seed % 4, "refine_over": (0, 20, 10_000)[seed % 3]}
        interpreted(sampling_checks.check_split_sampling, 8, vocab_size, 200 + seed, ties=ties, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_flat_rows_are_drawn_from_narrowed_ranges(interpreted: Run, spread: float) -> None:
    sizes = {"split": 512, "refine_over": 64, "capacity": 1024, "tile": 512}
    interpreted(sampling_checks.check_flat_sampling, 2000, spread, sizes)


@pytest.mark.slow
def test_rows_without_a_choice_give_minus_one(interpreted: Run) -> None:
    interpreted(sampling_checks.check_broken_logits)


@pytest.mark.slow
def test_banned_tokens_are_never_drawn(interpreted: Run) -> None:
    interpreted(sampling_checks.check_banned_tokens_are_never_drawn)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 64), (5, 100), (3, 3001)])
def test_penalties_are_what_the_formula_says(interpreted: Run, num_rows: int, vocab_size: int) -> None:
    interpreted(sampling_checks.check_triton_penalties, num_rows, vocab_size, vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "vocab_size", "num_masks"), [(4, 100, 3), (1, 1, 1), (2, 5000, 2), (3, 64, 0)])
def test_masks_leave_the_allowed_tokens(interpreted: Run, num_rows: int, vocab_size: int, num_masks: int) -> None:
    interpreted(sampling_checks.check_triton_masks, num_rows, vocab_size, num_masks, vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "seed"), [(1, 0), (33, 1), (5000, 2)])
def test_the_likeliest_of_the_allowed_tokens(interpreted: Run, vocab_size: int, seed: int) -> None:
    interpreted(sampling_checks.check_triton_likeliest, vocab_size, seed)


@pytest.mark.slow
def test_times_of_tokens_are_those_of_the_reference_to_the_bit(interpreted: Run) -> None:
    interpreted(sampling_checks.check_times)


CLAMPED = Activation("clamped", alpha=1.702, limit=3.0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
"""The interpreter cuts bf16 off instead of rounding it: once or twice stays within the tolerance, not more often."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (3, 1000), (1, 4096), (0, 64), (4, 3, 80)])
def test_rms_norm_equals_the_reference(interpreted: Run, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    interpreted(decoder_checks.check_rms_norm, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 64), (2, 5000), (1, 1), (0, 64)])
def test_act_and_mul_equals_the_reference(interpreted: Run, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    interpreted(decoder_checks.check_act_and_mul, num_tokens, size, dtype=dtype)


@pytest.mark.parametrize("activation", [GELU, CLAMPED])
def test_other_activations_equal_the_reference(interpreted: Run, activation: Activation) -> None:
    interpreted(decoder_checks.check_act_and_mul, 3, 100, activation)
    interpreted(decoder_checks.check_experts, 7, 4, 2, activation=activation)


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
