"""Decode attention to latents: products bound it where there are many heads, reading where there are few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shared.kernels.attention.decode.splits import DecodeConfig
from shared.kernels.attention.latent.launch import LatentConfig, latent_attention
from shared.kernels.batch import AttentionBatch
from shared.kernels.bench_case import Case
from shared.kernels.pool_view import PoolView

BLOCK_SIZE = 16
Setting = tuple[Sequence[int], int, int]
"""(KV length of each sequence, heads, elements of a row)."""

SETTINGS: tuple[Setting, ...] = (
    ((4096,) * 64, 128, 576),
    ((4096,) * 64, 16, 576),
    ((32_768,), 128, 576),
)
"""DeepSeek-V3's and DeepSeek-V2-Lite's heads."""
FEW_HEADS = (
    LatentConfig(16, DecodeConfig(32, 8, 4, 4, 2)),
    LatentConfig(16, DecodeConfig(32, 8, 2, 4, 3)),
    LatentConfig(16, DecodeConfig(32, 8, 4, 4, 3)),
    LatentConfig(16, DecodeConfig(32, 8, 8, 4, 3)),
)
MANY_HEADS = (
    LatentConfig(16, DecodeConfig(32, 8, 4, 4, 2)),
    *(LatentConfig(64, DecodeConfig(32, 8, parts, 8, 2)) for parts in (1, 2, 4)),
    *(LatentConfig(64, DecodeConfig(64, 4, parts, 8, 2)) for parts in (1, 2, 4)),
)


def cases(device: torch.device, settings: Sequence[Setting] = SETTINGS) -> Iterator[Case]:
    """One case a setting."""
    for setting in settings:
        yield from _cases(device, setting, (None,))


def tuning_cases(device: torch.device, settings: Sequence[Setting] = SETTINGS) -> Iterator[Case]:
    """The sizes that a launch could be compiled for."""
    for setting in settings:
        yield from _cases(device, setting, MANY_HEADS if setting[1] > 64 else FEW_HEADS)


def _cases(device: torch.device, setting: Setting, configs: Sequence[LatentConfig | None]) -> Iterator[Case]:
    """A case for each config, all over the same inputs."""
    kv_lens, num_heads, dim = setting
    widths = [-(-kv_len // BLOCK_SIZE) for kv_len in kv_lens]
    starts = [sum(widths[:row]) for row in range(len(widths))]
    tables = [range(start, start + width) for start, width in zip(starts, widths, strict=True)]
    batch = AttentionBatch.from_lists([1] * len(kv_lens), kv_lens, tables, BLOCK_SIZE, device)
    query = torch.randn(len(kv_lens), num_heads, dim, device=device).bfloat16()
    pool = PoolView.over(torch.randn(sum(widths), 1, 1, 1, BLOCK_SIZE, dim, device=device).bfloat16())
    num_bytes = 2 * sum(kv_lens) * dim + 2 * query.nbytes
    label = f"{len(kv_lens)} × {max(kv_lens)} tokens, {num_heads} heads over rows of {dim}"
    for config in configs:
        run = partial(latent_attention, query, pool, 0, batch, scale=0.1, config=config)
        shape = label + (f", {config}" if config else "")
        yield Case("attention to latents", shape, run, num_bytes, 4 * sum(kv_lens) * num_heads * dim)
