"""Sampling: how its passes over the row compare with reading the logits once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shared.kernels.bench_case import Case
from shared.kernels.sampling.launch import SamplingSizes, sample_tokens
from shared.kernels.sampling.mask_launch import mask_tokens
from shared.kernels.sampling.reference import sample_tokens as sample_by_sorting
from shared.kernels.sampling.rows import SamplingRows

SHAPES = ((1, 128_256), (64, 128_256), (256, 128_256))
WAYS_TO_CHOOSE = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-p": (1.0, 0, 0.95, 0.0),
    "top-k, top-p, min-p": (0.8, 50, 0.95, 0.05),
}
"""(temperature, top_k, top_p, min_p)"""


SIZES = (
    SamplingSizes(),
    SamplingSizes(split=1024),
    SamplingSizes(split_warps=8),
    SamplingSizes(refine_over=256),
    SamplingSizes(refine_over=4096),
    SamplingSizes(tile=512, search_warps=4),
    SamplingSizes(search_warps=4),
    SamplingSizes(tile=2048, search_warps=16),
    SamplingSizes(ways=8),
    SamplingSizes(tile=512, search_warps=4, ways=8),
)
"""Each differs from the first, which is the launcher's own, in one respect or two."""


def cases(device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Case]:
    """Each way to choose, from logits of bf16 precision, and the sort that it avoids."""
    for num_rows, vocab_size in shapes:
        logits = _logits(num_rows, vocab_size, device)
        for name in WAYS_TO_CHOOSE:
            rows = _rows(num_rows, name, device)
            label = f"{num_rows} × {vocab_size}, {name}"
            yield Case("sampling", label, partial(sample_tokens, logits, rows), logits.nbytes)
        yield Case("sampling by sort", label, partial(sample_by_sorting, logits, rows), logits.nbytes)
        # Half of the tokens forbidden, word by word: the masks are read, and half of the logits written.
        words = torch.arange(-(-vocab_size // 32), dtype=torch.int32, device=device) % 2 - 1
        masks = words.repeat(num_rows, 1)
        places = torch.arange(num_rows, device=device)
        masked = partial(mask_tokens, logits.clone(), masks, places)
        yield Case("mask", f"{num_rows} × {vocab_size}", masked, masks.nbytes + logits.nbytes // 2)


def tuning_cases(device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Case]:
    """The sizes of a row's parts that a launch could be compiled for."""
    for num_rows, vocab_size in shapes:
        logits = _logits(num_rows, vocab_size, device)
        for name in WAYS_TO_CHOOSE:
            rows = _rows(num_rows, name, device)
            for sizes in SIZES:
                label = f"{num_rows} × {vocab_size}, {name}, {sizes}"
                yield Case("sampling", label, partial(sample_tokens, logits, rows, sizes), logits.nbytes)


def _logits(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    return (3 * torch.randn(num_rows, vocab_size, device=device)).bfloat16().float()


def _rows(num_rows: int, name: str, device: torch.device) -> SamplingRows:
    temperature, top_k, top_p, min_p = WAYS_TO_CHOOSE[name]
    return SamplingRows.from_lists(
        [temperature] * num_rows,
        [top_k] * num_rows,
        [top_p] * num_rows,
        [min_p] * num_rows,
        seeds=range(num_rows),
        positions=range(num_rows),
        device=device,
    )
