"""The deterministic product: what one order of sums for all numbers of rows costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional

from shared.kernels.bench_case import Case
from shared.kernels.matmul.launch import multiply

SHAPES = ((1, 4096, 28_672), (64, 4096, 28_672), (256, 4096, 28_672), (4096, 4096, 28_672), (4096, 4096, 4096))


def cases(device: torch.device, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> Iterator[Case]:
    """The kernel and torch's own product for each (num_rows, in_size, out_size)."""
    for rows, in_size, out_size in shapes:
        x = torch.randn(rows, in_size, device=device).bfloat16()
        weight = torch.randn(out_size, in_size, device=device).bfloat16()
        num_bytes = x.nbytes + weight.nbytes + 2 * rows * out_size
        flops = 2 * rows * in_size * out_size if rows > 256 else 0
        for name, run in (("matmul, one order of sums", multiply), ("matmul of torch", functional.linear)):
            yield Case(name, f"{rows} × {in_size} × {out_size}", partial(run, x, weight, None), num_bytes, flops)
