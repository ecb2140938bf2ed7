"""The gated delta rule: how fast a decode step reads and writes its states, and what a prompt's products reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.bench_case import Case
from shared.kernels.delta.launch import delta_attention
from shared.kernels.delta.reference import CHUNK
from shared.kernels.delta_layer import DeltaLayer
from shared.kernels.pool_view import PoolView
from shared.kv.groups import STATE_WINDOW, KVGroups

KEY_HEADS, VALUE_HEADS, DIM, KERNEL, WORDS, BLOCK_SIZE = 16, 32, 128, 4, 98_304, 16
KV_LAYERS, KV_HEADS = 12, 2
"""A layer of Qwen3-Next 80B, in blocks of its KV in bf16; and of Kimi Linear 48B, with as many key heads as others."""
STEPS = (1, 8, 64, 256)
PROMPTS = ((2048,), (8192,), (8192, 100, 700, 3000))


def cases(
    device: torch.device, steps: Sequence[int] = STEPS, prompts: Sequence[Sequence[int]] = PROMPTS
) -> Iterator[Case]:
    """One case for each batch of a decode step, and one for each step of prompts of some lengths."""
    for by_channel in (False, True):
        yield from _of_layer(_layer(device, by_channel=by_channel), steps, prompts)


def _of_layer(layer: DeltaLayer, steps: Sequence[int], prompts: Sequence[Sequence[int]]) -> Iterator[Case]:
    device, token_bytes = layer.conv.device, (layer.projected_size + layer.value_size) * 2
    heads = f"{layer.num_key_heads}/{VALUE_HEADS} heads of {DIM}"
    if layer.is_by_channel:
        heads += ", by channel"
    for batch in steps:
        num_bytes = batch * (2 * layer.state_elements * 4 + token_bytes)
        yield Case("delta step", f"{batch} sequences, {heads}", _run(layer, [1] * batch, 100, device), num_bytes)
    for lens in prompts:
        flops = sum(lens) * VALUE_HEADS * _token_flops()
        name = " + ".join(map(str, lens))
        yield Case("delta prompt", f"{name} tokens, {heads}", _run(layer, lens, 0, device), 0, flops)


def _token_flops() -> int:
    """FLOP of the products that a token's share of a chunk needs, for one head: with the keys of its chunk, the
    solution of its updates, what these read of a state, what a query reads, and what a state gets."""
    within = 2 * CHUNK * (2 * DIM + 2 * DIM + DIM)  # keys and queries with keys; own and reads; what a query reads
    return within + 2 * DIM * DIM * 3


def _layer(device: torch.device, *, by_channel: bool) -> DeltaLayer:
    key_heads = VALUE_HEADS if by_channel else KEY_HEADS

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device)

    return DeltaLayer(
        key_heads,
        VALUE_HEADS,
        DIM,
        DIM,
        KERNEL,
        is_by_channel=by_channel,
        conv=drawn(KERNEL, (2 * key_heads + VALUE_HEADS) * DIM),
        decay=-drawn(VALUE_HEADS).exp(),
        decay_bias=drawn(VALUE_HEADS * (DIM if by_channel else 1)) - 2,
        norm=drawn(DIM).bfloat16(),
        eps=1e-6,
        number=0,
        num_parts=KV_HEADS,
    )


def _run(layer: DeltaLayer, query_lens: Sequence[int], before: int, device: torch.device) -> partial[Tensor]:
    """One layer's call for a step of sequences with `before` tokens behind them."""
    num_states = -(-layer.state_elements // WORDS)
    groups = KVGroups(BLOCK_SIZE, (None, *[STATE_WINDOW] * num_states), num_states)
    kv_lens = [before + count for count in query_lens]
    tables, begin = [], 0
    for kv_len in kv_lens:
        end = begin + -(-kv_len // BLOCK_SIZE) * groups.size
        tables.append(range(begin, end))
        begin = end
    used = [groups.state_blocks(table, before, kv_len) for table, kv_len in zip(tables, kv_lens, strict=True)]
    numbers = {
        block: at for at, block in enumerate(sorted({b for rows in used for row in rows for b in row if b >= 0}))
    }
    blocks = [[[numbers.get(block, -1) for block in row] for row in rows] for rows in used]
    batch = AttentionBatch.from_lists(query_lens, kv_lens, tables, BLOCK_SIZE, device)
    batch = replace(batch, state_blocks=torch.tensor(blocks, dtype=torch.int32, device=device))
    run_words = WORDS // (KV_LAYERS * 2 * KV_HEADS)
    rows = torch.randn(len(numbers), KV_LAYERS, 2, KV_HEADS, 1, run_words, device=device)
    pool = PoolView(rows.view(torch.uint8).flatten(-2), torch.float32, 1, run_words)
    projected = torch.randn(sum(query_lens), layer.projected_size, device=device).bfloat16()
    return partial(delta_attention, projected, layer, pool, batch)
