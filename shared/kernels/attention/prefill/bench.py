"""Prefill attention: how much of a matrix product's rate it reaches, beside torch's own over contiguous keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.attention.bench_batch import LAYER, HeadShape, attention_inputs
from shared.kernels.attention.prefill.configs import PrefillConfig
from shared.kernels.attention.prefill.launch import prefill_attention
from shared.kernels.bench_case import Case

Setting = tuple[Sequence[tuple[int, int]], HeadShape]
"""((query_len, kv_len) of each sequence, heads)."""

SETTINGS: tuple[Setting, ...] = (
    (((8192, 8192),), HeadShape()),
    (((2048, 2048),) * 4, HeadShape()),
    (((2048, 32_768),), HeadShape()),
    (((256, 4096),) * 8, HeadShape()),
    (((8192, 8192),), HeadShape(block_size=64)),
    (((8192, 8192),), HeadShape(head_dim=64)),
    (((8192, 8192),), HeadShape(head_dim=256)),
)


def cases(device: torch.device, settings: Sequence[Setting] = SETTINGS, memory: Tensor | None = None) -> Iterator[Case]:
    """One case a setting, over the pool in `memory` (see `pool_memory`); where all is computed at once, torch's too."""
    for plan, shape in settings:
        yield _case(plan, shape, device, None, memory)
        if len(plan) == 1 and plan[0][0] == plan[0][1]:
            yield _torch_case(plan[0][0], shape, device)


def tuning_cases(device: torch.device, memory: Tensor | None = None) -> Iterator[Case]:
    """The sizes that a launch could be compiled for."""
    for rows, tile, num_warps, num_stages in product((64, 128), (64, 128), (4, 8), (2, 3, 4)):
        # 64 keys beside 128 rows spill in four warps.
        if tile * num_stages <= 384 and (rows, num_warps) != (128, 4):
            plan, shape = SETTINGS[0]
            yield _case(plan, shape, device, PrefillConfig(rows, tile, num_warps, num_stages), memory)


def num_flops(plan: Sequence[tuple[int, int]], shape: HeadShape) -> int:
    """Two products of two operations for each query head, dimension and pair of a query with a key it sees."""
    pairs = sum(query_len * kv_len - query_len * (query_len - 1) // 2 for query_len, kv_len in plan)
    return 4 * shape.num_heads * shape.head_dim * pairs


def _case(
    plan: Sequence[tuple[int, int]],
    shape: HeadShape,
    device: torch.device,
    config: PrefillConfig | None,
    memory: Tensor | None,
) -> Case:
    query, pool, batch = attention_inputs(plan, shape, device, memory)
    output = torch.empty_like(query)

    def run() -> None:
        prefill_attention(query, pool, LAYER, batch, output, scale=0.1, window=None, config=config)

    query_len, kv_len = plan[0]
    row_bytes = shape.num_kv_heads * shape.head_dim * query.element_size()
    label = f"{len(plan)} × {query_len} of {kv_len} tokens, {shape}" + (f", {config}" if config else "")
    return Case(
        "prefill attention",
        label,
        run,
        2 * sum(kv for _, kv in plan) * row_bytes + 2 * query.nbytes,
        num_flops(plan, shape),
    )


def _torch_case(num_tokens: int, shape: HeadShape, device: torch.device) -> Case:
    query, key, value = (
        torch.randn(1, num_heads, num_tokens, shape.head_dim, dtype=shape.dtype, device=device)
        for num_heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )

    def run() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    flops = num_flops(((num_tokens, num_tokens),), shape)
    return Case("torch sdpa", f"{num_tokens} tokens, {shape}", run, 2 * query.nbytes, flops)
