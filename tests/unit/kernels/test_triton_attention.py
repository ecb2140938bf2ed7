"""Triton's paged attention against the torch reference, interpreted."""

from __future__ import annotations

import pytest
import torch

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


def test_lengths_come_from_the_device(interpreted: Run) -> None:
    interpreted(checks.check_lengths_come_from_the_device)


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize(("rows", "tile"), [(16, 16), (32, 16), (16, 32)])
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


def test_the_layers_of_a_step_share_one_plan(interpreted: Run) -> None:
    interpreted(checks.check_layers_share_a_plan)


def test_offsets_into_the_pool_have_64_bits(interpreted: Run) -> None:
    interpreted(checks.check_slot_offsets_pass_32_bits)
