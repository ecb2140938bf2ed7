"""The gated activation: how fast rows pass through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shared.kernels.activation.launch import act_and_mul
from shared.kernels.bench_case import Case

SHAPES = ((64, 14_336), (8192, 14_336))


def cases(device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Case]:
    """One case for each (num_tokens, intermediate_size)."""
    for num_tokens, size in shapes:
        gate_up = torch.randn(num_tokens, 2 * size, device=device).bfloat16()
        yield Case("silu · mul", f"{num_tokens} × {size}", partial(act_and_mul, gate_up), 3 * gate_up.nbytes // 2)
