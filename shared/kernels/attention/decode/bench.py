"""Decode attention: how fast it reads the batch's keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from shared.kernels.attention.bench_batch import LAYER, HeadShape, attention_inputs
from shared.kernels.attention.decode.launch import decode_attention
from shared.kernels.attention.decode.splits import DecodeConfig
from shared.kernels.bench_case import Case

Setting = tuple[Sequence[int], HeadShape]
"""(KV length of each sequence, heads)."""

RAGGED = tuple(range(128, 8192, 128))
SETTINGS: tuple[Setting, ...] = (
    ((4096,) * 64, HeadShape()),
    ((2048,) * 64, HeadShape()),
    ((512,) * 256, HeadShape()),
    ((8192,), HeadShape()),
    ((131_072,), HeadShape()),
    ((8192,) * 8, HeadShape()),
    (RAGGED, HeadShape()),
    ((4096,) * 64, HeadShape(block_size=64)),
    ((4096,) * 16, HeadShape(num_kv_heads=32)),
    ((4096,) * 64, HeadShape(num_heads=64)),
    ((4096,) * 64, HeadShape(head_dim=64)),
    ((4096,) * 32, HeadShape(head_dim=256)),
)


GUESSED = tuple(
    (((2048,) * num_seqs, HeadShape(num_heads=num_heads)), queries)
    for num_seqs, num_heads, queries in product((1, 8), (32, 64), (1, 2, 4, 8))
)
"""Settings, and the tokens of each sequence that share a read."""


def cases(device: torch.device, settings: Sequence[Setting] = SETTINGS, memory: Tensor | None = None) -> Iterator[Case]:
    """One case a setting, over the pool in `memory`: see `pool_memory`; then those of steps that check guesses."""
    for setting in settings:
        yield _case(setting, device, None, memory)
    if settings is SETTINGS:
        for setting, queries in GUESSED:
            yield _case(setting, device, None, memory, queries)


def tuning_cases(device: torch.device, memory: Tensor | None = None) -> Iterator[Case]:
    """The sizes that a launch could be compiled for, at three settings."""
    for setting in (SETTINGS[0], SETTINGS[3], (RAGGED, HeadShape())):
        for tile, parts, num_warps, num_stages in product((32, 64, 128), (2, 3, 6), (4, 8), (2, 3, 4)):
            if tile * num_stages <= 256:
                config = DecodeConfig(tile, 128 // tile, parts, num_warps, num_stages)
                yield _case(setting, device, config, memory)


def _case(
    setting: Setting, device: torch.device, config: DecodeConfig | None, memory: Tensor | None, queries: int = 1
) -> Case:
    kv_lens, shape = setting
    query, pool, batch = attention_inputs([(queries, kv_len) for kv_len in kv_lens], shape, device, memory)
    output = torch.empty_like(query)

    def run() -> None:
        decode_attention(query, pool, LAYER, batch, output, scale=0.1, window=None, config=config, queries=queries)

    label = f"{len(kv_lens)} × {max(kv_lens)} tokens, {shape}" + (f", {config}" if config else "")
    label += f", {queries} checked" if queries > 1 else ""
    row_bytes = shape.num_kv_heads * shape.head_dim * query.element_size()
    return Case("decode attention", label, run, 2 * sum(kv_lens) * row_bytes + 2 * query.nbytes)
