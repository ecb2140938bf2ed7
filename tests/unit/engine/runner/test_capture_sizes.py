"""The sizes that steps are padded to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.runner.cuda_graphs import capture_sizes, padded_size, token_sizes


@pytest.mark.parametrize("sizes_of", [capture_sizes, token_sizes])
@given(most=st.integers(1, 20_000), data=st.data())
def test_every_size_has_the_smallest_rung_that_holds_it(sizes_of, most, data):
    sizes = sizes_of(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    size = data.draw(st.integers(1, most))
    chosen = padded_size(sizes, size)
    assert chosen >= size
    assert all(other < size or other >= chosen for other in sizes)


def test_padding_stays_small_and_rungs_stay_few():
    sizes = capture_sizes(256)
    assert len(sizes) <= 20
    assert max(padded_size(sizes, size) / size for size in range(40, 257)) < 1.25


@given(most=st.integers(1, 20_000), data=st.data())
def test_token_counts_are_padded_by_little(most, data):
    size = data.draw(st.integers(1, most))
    assert padded_size(token_sizes(most), size) <= max(size + 8, 1.25 * size)


def test_token_counts_are_few():
    assert token_sizes(100) == (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert len(token_sizes(2048)) == 40
