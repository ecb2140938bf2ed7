"""Launcher of Triton's sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.device import next_power_of_2
from shared.kernels.sampling.jit import choose_tokens
from shared.kernels.sampling.reference import check_sample_tokens
from shared.kernels.sampling.rows import SamplingRows
from shared.kernels.sampling.split_jit import LEVELS, collect_range, find_peaks, measure_levels


@dataclass(frozen=True)
class SamplingSizes:
    """Sizes of the parts of a row, in tokens."""

    split: int = 4096  # of one program, a multiple of `split_tile`
    split_tile: int = 512  # at once, in the passes over splits
    capacity: int = 4096  # that a row's list can hold
    tile: int = 2048  # at once, in the search
    ways: int = 4  # parts that a pass of the search cuts the range of weights into


def sample_tokens(logits: Tensor, rows: SamplingRows, sizes: SamplingSizes = SamplingSizes()) -> Tensor:
    """`SamplingOps.sample_tokens`.

    Weights differ from the reference's probabilities by a factor and by fp32 rounding. So both choose the same token
    unless the random point falls within that rounding (about 1e-7 of the mass) of a boundary. Greedy rows end with the
    first pass.
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
    level_masses = torch.empty((num_rows, LEVELS.value, num_splits), dtype=torch.int64, device=device)
    level_counts = torch.empty((num_rows, LEVELS.value, num_splits), dtype=torch.int32, device=device)
    listed = torch.empty((num_rows, sizes.capacity), dtype=torch.float32, device=device)
    listed_tokens = torch.empty((num_rows, sizes.capacity), dtype=torch.int32, device=device)
    ways = (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.seeds, rows.positions)
    grid, cut = (num_splits, num_rows), {"SPLIT": sizes.split, "TILE": sizes.split_tile}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    splits = next_power_of_2(num_splits)
    find_peaks[grid](logits, peaks, peak_tokens, vocab_size, num_splits, **cut, **options)
    measure_levels[grid](
        logits, peaks, peak_tokens, rows.temperatures, rows.min_ps, level_masses, level_counts,
        vocab_size, num_splits, SPLITS=splits, **cut, **options,
    )  # fmt: skip
    collect_range[grid](
        logits, peaks, peak_tokens, *ways, level_masses, level_counts, listed, listed_tokens,
        vocab_size, num_splits, CAPACITY=sizes.capacity, SPLITS=splits, **cut, **options,
    )  # fmt: skip
    choose_tokens[(num_rows,)](
        logits, peaks, peak_tokens, *ways, level_masses, level_counts, listed, listed_tokens, tokens,
        vocab_size, num_splits, CAPACITY=sizes.capacity, SPLITS=splits, WAYS=sizes.ways, TILE=sizes.tile,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens
