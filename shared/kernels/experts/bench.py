"""A layer's experts: how fast those that few tokens chose are read, and how fast many tokens are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shared.kernels.bench_case import Case
from shared.kernels.experts.launch import FEW_ROWS, MANY_ROWS, ExpertsConfig, GroupedExperts, ProductConfig

Shape = tuple[int, int, int, int, int]
"""(num_tokens, hidden_size, intermediate size, experts, experts of a token)."""

QWEN3_30B, MIXTRAL = (2048, 768, 128, 8), (4096, 14_336, 8, 2)
SHAPES: tuple[Shape, ...] = (
    (1, *QWEN3_30B),
    (64, *QWEN3_30B),
    (8192, *QWEN3_30B),
    (64, *MIXTRAL),
    (8192, *MIXTRAL),
)
"""Qwen3-30B-A3B's and Mixtral-8x7B's."""
FEW_SHAPES: tuple[Shape, ...] = ((1, *QWEN3_30B), (64, *QWEN3_30B))
MANY_SHAPES: tuple[Shape, ...] = (
    (1024, *QWEN3_30B),
    (2048, *QWEN3_30B),
    (8192, *QWEN3_30B),
    (512, *MIXTRAL),
    (8192, *MIXTRAL),
)

_BEFORE = ProductConfig(64, 64, 4, 3)
FEW_CONFIGS = (
    ExpertsConfig(16, 1, _BEFORE, _BEFORE),
    ExpertsConfig(16, 1, ProductConfig(64, 64, 4, 5), ProductConfig(64, 64, 4, 5)),
    FEW_ROWS,
    ExpertsConfig(16, 1, ProductConfig(16, 256, 4, 3), ProductConfig(32, 256, 4, 3)),
)
MANY_CONFIGS = (
    ExpertsConfig(64, 8, _BEFORE, _BEFORE),
    ExpertsConfig(128, 8, ProductConfig(64, 64, 8, 4), ProductConfig(128, 64, 8, 4)),
    MANY_ROWS,
    ExpertsConfig(128, 16, MANY_ROWS.gate_up, MANY_ROWS.down),
)


def cases(device: torch.device, shapes: Sequence[Shape] = SHAPES) -> Iterator[Case]:
    """One case a shape, each token's experts drawn at random."""
    for shape in shapes:
        experts, inputs = _inputs(device, shape)
        yield _case(shape, experts, partial(experts.forward, *inputs), "")


def tuning_cases(
    device: torch.device,
    few: Sequence[Shape] = FEW_SHAPES,
    many: Sequence[Shape] = MANY_SHAPES,
    configs: tuple[Sequence[ExpertsConfig], Sequence[ExpertsConfig]] = (FEW_CONFIGS, MANY_CONFIGS),
) -> Iterator[Case]:
    """The sizes that the products could be compiled for, and torch's own grouped product for many rows."""
    for shapes, sizes in zip((few, many), configs, strict=True):
        for shape in shapes:
            experts, inputs = _inputs(device, shape)
            for config in sizes:
                yield _case(shape, experts, partial(experts.by_tiles, *inputs, config), f", {config}")
            if shapes is many:
                yield _case(shape, experts, partial(experts.by_torch, *inputs), ", torch's grouped product")


def _inputs(device: torch.device, shape: Shape) -> tuple[GroupedExperts, tuple[Tensor, Tensor, Tensor]]:
    """The experts, and what `forward` takes."""
    num_tokens, hidden, inner, num_experts, top_k = shape
    gate_up = torch.randn(num_experts, 2 * inner, hidden, device=device).bfloat16()
    down = torch.randn(num_experts, hidden, inner, device=device).bfloat16()
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    weights, ids = torch.rand(num_tokens, num_experts, device=device).topk(top_k)
    return GroupedExperts(gate_up, down, 0), (x, ids, weights)


def _case(shape: Shape, experts: GroupedExperts, run: Callable[[], object], label: str) -> Case:
    num_tokens, hidden, inner, num_experts, top_k = shape
    chosen = 1 - (1 - top_k / num_experts) ** num_tokens  # share of the experts, in the mean
    flops = 6 * num_tokens * top_k * hidden * inner if num_tokens * top_k > 64 * num_experts else 0
    name = f"{num_tokens} tokens, {top_k} of {num_experts} experts of {hidden} × {inner}{label}"
    return Case("experts", name, run, int(chosen * experts.nbytes) + 4 * num_tokens * hidden, flops)
