"""Paged attention against the textbook formula over contiguous keys and values."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels.attention import QUERY_TILE, paged_attention
from shared.kernels.batch import AttentionBatch
from shared.kernels.kv_write import write_kv

NUM_LAYERS, LAYER, HEAD_DIM = 3, 1, 8


class Case:
    """Random sequences in a shuffled pool whose other slots are NaN."""

    def __init__(
        self,
        plan: list[tuple[int, int]],  # (query_len, kv_len) of each sequence
        heads: tuple[int, int] = (4, 2),
        block_size: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        self.plan = plan
        self.group = num_heads // num_kv_heads
        self.keys = [torch.randn(kv, num_kv_heads, HEAD_DIM, generator=generator).to(dtype) for _, kv in plan]
        self.values = [
            torch.randn(kv, num_kv_heads, HEAD_DIM, generator=generator).to(dtype) for _, kv in plan
        ]
        num_tokens = sum(query_len for query_len, _ in plan)
        self.query = torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)
        widths = [-(-kv // block_size) for _, kv in plan]
        num_blocks = sum(widths) + 2
        free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.tables = [[free.pop() for _ in range(width)] for width in widths]
        self.batch = AttentionBatch.from_lists(*zip(*plan, strict=True), self.tables, block_size)
        shape = (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, HEAD_DIM)
        self.kv_blocks = torch.full(shape, float("nan"), dtype=dtype)
        for (_, kv), table, key, value in zip(plan, self.tables, self.keys, self.values, strict=True):
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(kv)])
            write_kv(key, value, self.kv_blocks, LAYER, slots)

    def run(self, window: int | None = None, scale: float = 0.3) -> Tensor:
        """[num_tokens, num_heads * head_dim]"""
        return paged_attention(self.query, self.kv_blocks, LAYER, self.batch, scale=scale, window=window)

    def expected(self, window: int | None = None, scale: float = 0.3) -> Tensor:
        """The formula in float64, one query at a time."""
        rows = []
        queries = iter(self.query.double())
        for (query_len, kv_len), key, value in zip(self.plan, self.keys, self.values, strict=True):
            key = key.double().repeat_interleave(self.group, dim=1)
            value = value.double().repeat_interleave(self.group, dim=1)
            for position in range(kv_len - query_len, kv_len):
                first = 0 if window is None else max(0, position - window + 1)
                seen = slice(first, position + 1)
                scores = torch.einsum("hd,khd->hk", next(queries), key[seen]) * scale
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[seen]).flatten())
        return torch.stack(rows)


plans = st.lists(
    st.integers(1, 40).flatmap(lambda kv: st.tuples(st.sampled_from([1, 1, kv, (kv + 1) // 2]), st.just(kv))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(
    plan=plans,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 3, 16, 100]),
    seed=st.integers(0, 9),
)
def test_any_mix_of_chunks_and_decodes_follows_the_formula(
    plan: list[tuple[int, int]], heads: tuple[int, int], block_size: int, window: int | None, seed: int
) -> None:
    case = Case(plan, heads, block_size, seed)
    torch.testing.assert_close(case.run(window).double(), case.expected(window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5, QUERY_TILE + 3])
def test_prompts_longer_than_a_tile_follow_the_formula(window: int | None) -> None:
    case = Case([(QUERY_TILE + 9, QUERY_TILE + 9), (2 * QUERY_TILE, 2 * QUERY_TILE + 30)], block_size=16)
    torch.testing.assert_close(case.run(window).double(), case.expected(window), rtol=0, atol=1e-5)


def test_a_sequence_gives_the_same_alone_and_among_others() -> None:
    plan = [(1, 7), (1, 70), (5, 9), (1, 1), (1, 33)]
    case = Case(plan)
    together = case.run()
    start = 0
    for index, (query_len, kv_len) in enumerate(plan):
        rows = slice(start, start + query_len)
        start += query_len
        alone = AttentionBatch.from_lists([query_len], [kv_len], [case.tables[index]], 4)
        result = paged_attention(case.query[rows], case.kv_blocks, LAYER, alone, scale=0.3, window=None)
        torch.testing.assert_close(together[rows], result, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype) -> None:
    case = Case([(1, 9), (6, 20), (1, 40)], dtype=dtype)
    assert case.run().dtype == dtype
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=0, atol=0.02)


def test_table_entries_past_a_sequences_last_block_are_not_read() -> None:
    case = Case([(1, 5), (3, 6), (1, 30)])
    tables = case.batch.block_tables.clone()
    for row, table in enumerate(case.tables):
        tables[row, len(table) :] = 1 << 30
    expected = case.run()
    case.batch = replace(case.batch, block_tables=tables)
    assert torch.equal(case.run(), expected)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    case = Case([(1, 5), (3, 6)])
    with pytest.raises(AssertionError):
        paged_attention(case.query[1:], case.kv_blocks, LAYER, case.batch, scale=1.0, window=None)
    with pytest.raises(AssertionError):
        paged_attention(case.query.half(), case.kv_blocks, LAYER, case.batch, scale=1.0, window=None)
    with pytest.raises(AssertionError):
        paged_attention(case.query, case.kv_blocks, NUM_LAYERS, case.batch, scale=1.0, window=None)
    with pytest.raises(AssertionError):
        paged_attention(case.query[:, :3], case.kv_blocks, LAYER, case.batch, scale=1.0, window=None)
