"""The sizes that decode steps are padded to."""

from __future__ import annotations

import pytest

from shared.engine.runner.capture_sizes import capture_sizes, padded_size


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 63, 64, 100, 256, 1000])
def test_every_size_has_the_smallest_rung_that_holds_it(most):
    sizes = capture_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for size in range(1, most + 1):
        chosen = padded_size(sizes, size)
        assert chosen >= size
        assert all(other < size or other >= chosen for other in sizes)


def test_padding_stays_small_and_rungs_stay_few():
    sizes = capture_sizes(256)
    assert len(sizes) <= 20
    assert max(padded_size(sizes, size) / size for size in range(40, 257)) < 1.25
