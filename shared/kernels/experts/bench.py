"""A layer's experts: how fast those that few tokens chose are read, and how fast many tokens are multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shared.kernels.bench_case import Case
from shared.kernels.experts.launch import make_grouped_experts

Shape = tuple[int, int, int, int, int]
"""(num_tokens, hidden_size, intermediate size, experts, experts of a token)."""

SHAPES: tuple[Shape, ...] = (
    (1, 2048, 768, 128, 8),
    (64, 2048, 768, 128, 8),
    (8192, 2048, 768, 128, 8),
    (64, 4096, 14_336, 8, 2),
    (8192, 4096, 14_336, 8, 2),
)
"""Qwen3-30B-A3B's and Mixtral-8x7B's."""


def cases(device: torch.device, shapes: Sequence[Shape] = SHAPES) -> Iterator[Case]:
    """One case a shape, each token's experts drawn at random."""
    for num_tokens, hidden, inner, num_experts, top_k in shapes:
        gate_up = torch.randn(num_experts, 2 * inner, hidden, device=device).bfloat16()
        down = torch.randn(num_experts, hidden, inner, device=device).bfloat16()
        x = torch.randn(num_tokens, hidden, device=device).bfloat16()
        weights, ids = torch.rand(num_tokens, num_experts, device=device).topk(top_k)
        experts = make_grouped_experts(gate_up, down, 0, own=False)
        chosen = 1 - (1 - top_k / num_experts) ** num_tokens  # share of the experts, in the mean
        flops = 6 * num_tokens * top_k * hidden * inner if num_tokens * top_k > 64 * num_experts else 0
        label = f"{num_tokens} tokens, {top_k} of {num_experts} experts of {hidden} × {inner}"
        num_bytes = int(chosen * experts.nbytes) + 2 * x.nbytes
        yield Case("experts", label, partial(experts.forward, x, ids, weights), num_bytes, flops)
