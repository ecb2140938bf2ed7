"""Prompt tokens are a function of seed and label, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workloads.tokens import Span, TokenSource
from shared.errors import ConfigError


@given(seed=st.integers(0, 2**31), label=st.text(max_size=20), short=st.integers(0, 50), more=st.integers(0, 50))
def test_a_shorter_span_is_a_prefix_of_a_longer_one(seed: int, label: str, short: int, more: int) -> None:
    tokens = TokenSource(seed)
    assert tokens.span(Span(label, short + more))[:short] == tokens.span(Span(label, short))


def test_tokens_lie_in_the_vocabulary_above_the_special_ones() -> None:
    drawn = TokenSource(1, vocab_size=300, first_id=100).span(Span("a", 20_000))
    assert (min(drawn), max(drawn)) == (100, 299)
    assert len(set(drawn)) == 200


def test_equal_labels_are_equal_and_seeds_and_labels_tell_apart() -> None:
    a, b = TokenSource(1), TokenSource(2)
    assert a.span(Span("x", 16)) == TokenSource(1).span(Span("x", 16))
    assert a.span(Span("x", 16)) != a.span(Span("y", 16))
    assert a.span(Span("x", 16)) != b.span(Span("x", 16))


def test_a_prompt_is_its_spans_in_order() -> None:
    tokens = TokenSource(3)
    spans = (Span("a", 3), Span("b", 2))
    assert tokens.prompt(spans) == tokens.span(spans[0]) + tokens.span(spans[1])


def test_blocks_too_short_to_tell_hash_ids_apart_are_refused() -> None:
    TokenSource(0).check_block(16)
    with pytest.raises(ConfigError, match="smaller scale or a larger vocab_size"):
        TokenSource(0).check_block(4)
    with pytest.raises(ConfigError, match="vocab_size"):
        TokenSource(0, vocab_size=100)
