"""Head norm, rotation and KV write: how fast a step's projections pass through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shared.kernels.bench_case import Case
from shared.kernels.pool_view import PoolView
from shared.kernels.rotary.launch import rotate_and_write

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TOKENS = (64, 8192, 32_768)


def cases(device: torch.device, tokens: Sequence[int] = TOKENS) -> Iterator[Case]:
    """With and without head norms, for each number of tokens."""
    for num_tokens in tokens:
        sizes = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]
        qkv = torch.randn(num_tokens, sum(sizes), device=device).bfloat16()
        query, key, value = (part.view(num_tokens, -1, HEAD_DIM) for part in torch.split(qkv, sizes, dim=-1))
        cos, sin = (torch.randn(num_tokens, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        shape = (-(-num_tokens // BLOCK_SIZE), 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        pool = PoolView.over(torch.zeros(shape, dtype=torch.bfloat16, device=device))
        slots = torch.arange(num_tokens, device=device)
        norm = torch.ones(HEAD_DIM, device=device).bfloat16()
        for name, weight in (("rotate + write", None), ("head norm + rotate + write", norm)):
            run = partial(
                rotate_and_write, query, key, value, cos, sin, pool, 0, slots,
                q_norm=weight, k_norm=weight, eps=1e-6,
            )  # fmt: skip
            label = f"{num_tokens} tokens, {NUM_HEADS}/{NUM_KV_HEADS} heads of {HEAD_DIM}"
            yield Case(name, label, run, 2 * qkv.nbytes + cos.nbytes)  # half of cos and of sin
