"""Sampling: how its passes over the row compare with reading the logits once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shared.kernels.bench_case import Case
from shared.kernels.sampling.launch import sample_tokens
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


def cases(device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Case]:
    """Each way to choose, from logits of bf16 precision, and the sort that it avoids."""
    for num_rows, vocab_size in shapes:
        logits = (3 * torch.randn(num_rows, vocab_size, device=device)).bfloat16().float()
        for name, (temperature, top_k, top_p, min_p) in WAYS_TO_CHOOSE.items():
            rows = SamplingRows.from_lists(
                [temperature] * num_rows,
                [top_k] * num_rows,
                [top_p] * num_rows,
                [min_p] * num_rows,
                seeds=range(num_rows),
                positions=range(num_rows),
                device=device,
            )
            label = f"{num_rows} × {vocab_size}, {name}"
            yield Case("sampling", label, partial(sample_tokens, logits, rows), logits.nbytes)
        yield Case("sampling by sort", label, partial(sample_by_sorting, logits, rows), logits.nbytes)
        # Half of the tokens forbidden, word by word: the masks are read, and half of the logits written.
        words = torch.arange(-(-vocab_size // 32), dtype=torch.int32, device=device) % 2 - 1
        masks = words.repeat(num_rows, 1)
        places = torch.arange(num_rows, device=device)
        masked = partial(mask_tokens, logits.clone(), masks, places)
        yield Case("mask", f"{num_rows} × {vocab_size}", masked, masks.nbytes + logits.nbytes // 2)
