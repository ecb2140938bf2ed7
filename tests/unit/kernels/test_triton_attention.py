"""Triton's attention against the formula, and how decode cuts sequences into parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shared.kernels.attention.decode.splits import DecodeConfig, DecodeGrid, decode_config, decode_grid
from shared.kernels.attention.prefill.cuts import cut_chunk, long_chunks, num_pairs, shapes_until
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import DeviceLimits
from tests.examples import examples

from . import attention_checks as checks
from .conftest import Run

MIXED = [(1, 1), (9, 9), (1, 37), (4, 70), (2, 2), (1, 16)]
"""Single tokens among chunks; a first token, whole prompts, chunks that see a cached prefix."""

HEAD_DIMS = [64, 80, 96, 128, 256]
GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
BLOCK_SIZES = [16, 32, 64]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_shape_equals_the_reference(
    interpreted: Run, head_dim: int, block_size: int, dtype: torch.dtype, group: int
) -> None:
    interpreted(
        checks.check_attention,
        [*MIXED, (1, 150), (40, 131)] if group == 4 else MIXED,
        heads=(2 * group, 2) if group < 5 else (group, 1),
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=19 if (group + block_size // 16) % 2 else None,
    )


@pytest.mark.parametrize(
    ("softcap", "has_sinks", "window"), [(1.5, False, None), (None, True, 1), (None, True, None), (0.7, True, 19)]
)
def test_bounds_of_scores_and_sinks_equal_the_reference(
    interpreted: Run, softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    interpreted(
        checks.check_attention, MIXED, heads=(6, 2), head_dim=16, block_size=16, window=window, softcap=softcap,
        has_sinks=has_sinks,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    ("plan", "has_guesses"), [([(1, 214), (3, 212), (7, 216)], False), ([(2, 215), (3, 216)], True)]
)
def test_what_earlier_owners_left_in_a_block_reaches_no_token_through_a_hole(
    interpreted: Run, plan: list[tuple[int, int]], has_guesses: bool, kv_dtype: torch.dtype
) -> None:
    interpreted(checks.check_holes, plan, has_guesses=has_guesses, head_dim=16, block_size=16, kv_dtype=kv_dtype)


def test_a_sink_counts_once_for_a_sequence_cut_into_parts(interpreted: Run) -> None:
    interpreted(checks.check_split_decode, [150, 1, 33], tile=16, heads=(6, 2), head_dim=16, has_sinks=True)


@pytest.mark.parametrize("plan", [[(1, 1)], [(1, 16)], [(1, 17)], [(2, 2)], [(16, 16)], [(17, 33)]])
def test_lone_sequences_at_the_edges_of_a_block_equal_the_reference(
    interpreted: Run, plan: list[tuple[int, int]]
) -> None:
    interpreted(checks.check_attention, plan, head_dim=16, block_size=16)


def test_empty_batch_gives_no_rows(interpreted: Run) -> None:
    interpreted(checks.check_attention, [], head_dim=16, block_size=16)


@pytest.mark.parametrize(
    ("kv_lens", "tile", "min_tiles", "parts_per_multiprocessor", "window"),
    [
        ([150, 1, 16, 33], 16, 1, 8, None),  # as many parts as tiles
        ([150, 16, 33], 16, 3, 8, None),  # a few tiles a part, the last one shorter
        ([200, 1, 1, 90], 16, 1, 1, None),  # fewer parts than sequences ask for
        ([150, 33], 16, 1, 8, 40),  # parts of what the window shows
        ([150, 33], 16, 1, 8, 1),
        ([300], 16, 1, 8, None),  # more parts than the merge reads at once
    ],
)
def test_sequences_cut_into_parts_equal_the_reference(
    interpreted: Run,
    kv_lens: list[int],
    tile: int,
    min_tiles: int,
    parts_per_multiprocessor: int,
    window: int | None,
) -> None:
    interpreted(
        checks.check_split_decode,
        kv_lens,
        tile=tile,
        min_tiles=min_tiles,
        parts_per_multiprocessor=parts_per_multiprocessor,
        window=window,
        heads=(3, 1),
        head_dim=24,
        block_size=16,
    )


@pytest.mark.parametrize(
    ("window", "is_chunked", "has_sinks"),
    [(None, False, False), (None, False, True), (1, False, False), (40, False, True), (40, True, False)],
)
@pytest.mark.parametrize(("heads", "tile"), [((3, 1), 16), pytest.param((8, 2), 32, marks=pytest.mark.slow)])
def test_the_few_tokens_of_a_query_share_a_read_of_parts(
    interpreted: Run, heads: tuple[int, int], tile: int, window: int | None, is_chunked: bool, has_sinks: bool
) -> None:
    """Parts that some tokens of a query see nothing of, in front of a window or behind a token, among them."""
    plan = [(5, 150), (1, 37), (8, 8), (2, 17), (8, 130)]
    interpreted(
        checks.check_split_decode, plan, queries=8, tile=tile, window=window, heads=heads, head_dim=24,
        block_size=16, has_sinks=has_sinks, is_chunked=is_chunked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "heads", "head_dim"),
    [
        ([(4, 70), (1, 37), (2, 2)], (8, 2), 64),
        ([(16, 99), (1, 1)], (4, 1), 16),
        ([(9, 99), (1, 20)], (8, 1), 16),  # more rows than a program has
        ([(5, 40)], (2, 1), 128),
    ],
)
def test_steps_that_check_guesses_equal_the_formula(
    interpreted: Run, plan: list[tuple[int, int]], heads: tuple[int, int], head_dim: int
) -> None:
    for dtypes in ({}, {"kv_dtype": torch.int8}, {"dtype": torch.float16}):
        sizes = {"heads": heads, "head_dim": head_dim, "block_size": 16, **dtypes}
        interpreted(checks.check_attention, plan, has_guesses=True, **sizes)


def test_lengths_come_from_the_device(interpreted: Run) -> None:
    interpreted(checks.check_lengths_come_from_the_device)


@pytest.mark.parametrize("window", [None, 7, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 30))])
@pytest.mark.parametrize(("rows", "tile"), [(32, 16), (16, 32), pytest.param(16, 16, marks=pytest.mark.slow)])
def test_tiles_on_every_side_of_the_window_equal_the_reference(
    interpreted: Run, rows: int, tile: int, window: int | None
) -> None:
    interpreted(
        checks.check_prefill_tiles,
        [(1, 20), (23, 61), (5, 5)],
        rows=rows,
        tile=tile,
        window=window,
        heads=(3, 1),
        head_dim=16,
        block_size=8,
    )


@pytest.mark.parametrize("window", [7, 16, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 30))])
def test_chunks_equal_the_formula(interpreted: Run, window: int) -> None:
    sizes = {"window": window, "is_chunked": True, "heads": (3, 1), "head_dim": 16, "block_size": 8}
    interpreted(checks.check_prefill_tiles, [(1, 20), (23, 61), (5, 5)], rows=16, tile=16, **sizes)
    interpreted(checks.check_split_decode, [150, 33, 1, 60], tile=16, **sizes)
    interpreted(checks.check_attention, [(1, 61), (23, 61), (1, 1)], **sizes)


@pytest.mark.parametrize(
    "plan", [[(32, 32)], [(37, 90)], pytest.param([(16, 417), (50, 51), (21, 64)], marks=pytest.mark.slow)]
)
def test_long_chunks_joined_from_parts_equal_the_formula(interpreted: Run, plan: list[tuple[int, int]]) -> None:
    for heads, head_dim in (((3, 1), 16), ((4, 2), 24)):
        sizes = {"heads": heads, "head_dim": head_dim, "block_size": 8}
        interpreted(checks.check_long_chunks, plan, unit=16, by_torch=True, **sizes)


def test_a_thread_prepares_every_shape_that_a_chunk_may_have(interpreted: Run) -> None:
    interpreted(checks.check_prepared_shapes, max_tokens=12, unit=4)


def test_chunks_past_a_length_are_left_alone(interpreted: Run) -> None:
    plan = [(1, 20), (23, 61), (5, 5), (24, 40), (6, 90)]
    interpreted(checks.check_prefill_tiles, plan, rows=16, tile=16, window=None, most=23, heads=(3, 1), head_dim=16)


@given(query_len=st.integers(1, 900), context=st.integers(0, 3000), unit=st.sampled_from([1, 16, 100]))
@example(query_len=1, context=0, unit=16)
def test_each_pair_of_a_chunk_lies_in_one_part_of_its_cut(query_len: int, context: int, unit: int) -> None:
    cut = cut_chunk(query_len, context + query_len, unit)
    seen = np.zeros((query_len, context + query_len), dtype=np.int64)
    first = context - cut.lead
    seen[:, first:] += np.arange(first, context + query_len) <= np.arange(context, context + query_len)[:, None]
    for part in cut.rectangles:
        assert part.first_key + part.keys <= first
        seen[part.first_row : part.first_row + part.rows, part.first_key : part.first_key + part.keys] += 1
    assert (seen == np.tri(*seen.shape, context, dtype=np.int64)).all()
    squares, rectangles = shapes_until(cut.square, unit)
    assert cut.square in squares
    assert {(part.rows, part.keys) for part in cut.rectangles} <= set(rectangles)
    assert cut.num_pairs >= num_pairs(query_len, context + query_len)


def test_long_chunks_are_cut_where_that_computes_faster() -> None:
    def chosen(*plan: tuple[int, int]) -> tuple[int, ...]:
        query_lens, kv_lens = zip(*plan, strict=True)
        tables = [range(-(-max(kv_lens) // 16))] * len(plan)
        return long_chunks(AttentionBatch.from_lists(query_lens, kv_lens, tables, 16), num_heads=32)

    assert chosen((8192, 8192)) == chosen((2048, 8192)) == (0,)
    assert chosen((1, 4000), (4096, 4096), (700, 700), (2048, 4096)) == (1, 3)
    assert chosen((1023, 9000)) == chosen((1100, 1100)) == chosen((2048, 2064)) == ()


def test_the_layers_of_a_step_share_one_plan(interpreted: Run) -> None:
    interpreted(checks.check_layers_share_a_plan)


def test_offsets_into_the_pool_have_64_bits(interpreted: Run) -> None:
    interpreted(checks.check_slot_offsets_pass_32_bits)


H100 = DeviceLimits("sm_90", 227 * 1024, num_multiprocessors=132)


def parts_of(kv_lens: list[int], grid: DecodeGrid, config: DecodeConfig) -> list[int]:
    """The kernel's schedule (`plan_decode_items`), without a window."""
    tiles = [-(-kv_len // config.tile) for kv_len in kv_lens]

    def cut(num_items: int) -> tuple[list[int], list[int]]:
        longest = max(-(-sum(tiles) // num_items), config.min_tiles)
        part_tiles = [max(1, -(-count // max(1, -(-count // longest)))) for count in tiles]
        return part_tiles, [max(1, -(-count // size)) for count, size in zip(tiles, part_tiles, strict=True)]

    part_tiles, parts = cut(grid.num_items)
    most = max(size if count else 0 for size, count in zip(part_tiles, tiles, strict=True))
    return cut(grid.num_uneven_items)[1] if most * sum(parts) * 5 > sum(tiles) * 6 else parts


@examples(100)
@given(
    kv_lens=st.lists(st.integers(0, 70_000), min_size=1, max_size=64),
    slack=st.integers(0, 5000),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    num_multiprocessors=st.sampled_from([8, 108, 132]),
    config=st.builds(
        DecodeConfig,
        tile=st.sampled_from([16, 64, 128]),
        min_tiles=st.integers(1, 8),
        parts_per_multiprocessor=st.integers(1, 16),
        num_warps=st.just(4),
        num_stages=st.just(3),
        uneven_parts=st.integers(0, 16),
    ),
)
def test_parts_fit_the_grid_whatever_the_lengths(
    kv_lens: list[int], slack: int, num_kv_heads: int, num_multiprocessors: int, config: DecodeConfig
) -> None:
    grid = decode_grid(len(kv_lens), max(kv_lens) + slack, num_kv_heads, num_multiprocessors, config)
    parts = parts_of(kv_lens, grid, config)
    assert sum(parts) <= grid.num_slots
    assert grid.has_merge or max(parts) == 1


def test_a_long_sequence_alone_fills_the_device() -> None:
    config = decode_config(head_dim=128, element_bytes=2, limits=H100)
    grid = decode_grid(1, 131_072, 8, 132, config)
    assert 8 * parts_of([131_072], grid, config)[0] >= 2 * 132


def test_short_sequences_stay_whole() -> None:
    config = decode_config(head_dim=128, element_bytes=2, limits=H100)
    grid = decode_grid(4, 4096, 8, 132, config)
    assert parts_of([100] * 4, grid, config) == [1] * 4
