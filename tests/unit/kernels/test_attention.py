"""Paged attention against the textbook formula over contiguous keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels.attention.reference import QUERY_TILE, paged_attention

from .attention_case import LAYER, AttentionCase


def run(case: AttentionCase, window: int | None = None) -> Tensor:
    return paged_attention(case.query, case.kv_blocks, LAYER, case.batch, scale=0.3, window=window)


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
    case = AttentionCase(plan, heads, block_size=block_size, seed=seed)
    torch.testing.assert_close(run(case, window).double(), case.expected(window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5, QUERY_TILE + 3])
def test_prompts_longer_than_a_tile_follow_the_formula(window: int | None) -> None:
    case = AttentionCase([(QUERY_TILE + 9, QUERY_TILE + 9), (2 * QUERY_TILE, 2 * QUERY_TILE + 30)], block_size=16)
    torch.testing.assert_close(run(case, window).double(), case.expected(window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype) -> None:
    case = AttentionCase([(1, 9), (6, 20), (1, 40)], dtype=dtype)
    assert run(case).dtype == dtype
    torch.testing.assert_close(run(case).double(), case.expected(), rtol=0, atol=0.02)
