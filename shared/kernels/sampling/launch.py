"""Launcher of Triton's sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.device import next_power_of_2
from shared.kernels.sampling.jit import choose_tokens
from shared.kernels.sampling.ranges_jit import FIELDS, SHARES, TOTALS, place_ranges
from shared.kernels.sampling.reference import check_sample_tokens
from shared.kernels.sampling.rows import SamplingRows
from shared.kernels.sampling.split_jit import (
    LONGEST_SPLIT,
    find_peaks,
    measure_levels,
    race_and_collect,
    refine_levels,
)


@dataclass(frozen=True)
class SamplingSizes:
    """Sizes of the parts of a row, in tokens."""

    split: int = 2048  # of one program, which holds them in registers: a power of 2, 64 to LONGEST_SPLIT
    split_warps: int = 4  # of that program
    refine_over: int = 1024  # that a row's ranges may have without a second pass over thresholds
    capacity: int = 16_384  # that a row's list can hold
    tile: int = 1024  # at once, in the search
    search_warps: int = 8
    ways: int = 4  # parts that a pass of the search cuts the range of weights into, at least 2

    def __post_init__(self) -> None:
        assert 64 <= self.split <= LONGEST_SPLIT.value
        assert self.ways >= 2


def sample_tokens(logits: Tensor, rows: SamplingRows, sizes: SamplingSizes = SamplingSizes()) -> Tensor:
    """`SamplingOps.sample_tokens`.

    Weights differ from the reference's probabilities by a factor and by fp32 rounding. So both choose the same token
    unless the two fastest are nearly as fast, or top-p or min-p ends within that rounding (about 1e-7 of the mass) of a
    boundary. Greedy rows end with the first pass; rows that nothing cuts are read once more.
    """
    check_sample_tokens(logits, rows)
    num_rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    num_splits = -(-vocab_size // sizes.split)
    peaks = torch.empty((num_rows, num_splits), dtype=torch.float32, device=device)
    peak_tokens = torch.empty((num_rows, num_splits), dtype=torch.int32, device=device)
    totals = torch.empty((num_rows, TOTALS.value, num_splits), dtype=torch.int64, device=device)
    fields = torch.empty((num_rows, FIELDS.value), dtype=torch.int32, device=device)
    shares = torch.empty((num_rows, SHARES.value), dtype=torch.float64, device=device)
    firsts = torch.empty((num_rows, num_splits), dtype=torch.int32, device=device)
    listed = torch.empty((num_rows, sizes.capacity), dtype=torch.float32, device=device)
    listed_tokens = torch.empty((num_rows, sizes.capacity), dtype=torch.int32, device=device)
    speeds = torch.empty((num_rows, num_splits), dtype=torch.float32, device=device)
    fastest = torch.empty((num_rows, num_splits), dtype=torch.int32, device=device)
    ways = (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps)
    grid, splits = (num_splits, num_rows), next_power_of_2(num_splits)
    options = {"SPLIT": sizes.split, "num_warps": sizes.split_warps, "enable_fp_fusion": False}

    def place(*, refined: bool) -> None:
        place_ranges[(num_rows,)](
            peaks, peak_tokens, *ways, totals, fields, shares, firsts, num_splits, sizes.refine_over,
            REFINED=refined, SPLITS=splits, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    find_peaks[grid](logits, peaks, peak_tokens, vocab_size, num_splits, **options)
    measure_levels[grid](
        logits, peaks, peak_tokens, *ways, totals, vocab_size, num_splits,
        SPLITS=splits, **options,
    )  # fmt: skip
    place(refined=False)
    refine_levels[grid](logits, rows.temperatures, fields, shares, totals, vocab_size, num_splits, **options)
    place(refined=True)
    race_and_collect[grid](
        logits, rows.temperatures, rows.seeds, rows.positions, fields, shares, firsts, listed, listed_tokens, speeds,
        fastest, vocab_size, num_splits, CAPACITY=sizes.capacity, **options,
    )  # fmt: skip
    choose_tokens[(num_rows,)](
        logits, peaks, peak_tokens, rows.temperatures, rows.top_ks, rows.top_ps, rows.seeds, rows.positions, fields,
        shares, listed, listed_tokens, speeds, fastest, tokens, vocab_size, num_splits, CAPACITY=sizes.capacity,
        SPLITS=splits, WAYS=sizes.ways, TILE=sizes.tile, num_warps=sizes.search_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens
