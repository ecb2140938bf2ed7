"""The sizes that decode steps are padded to."""

from __future__ import annotations

import pytest

from shared.engine.batch_ladder import batch_ladder, rung


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 63, 64, 100, 256, 1000])
def test_every_size_has_the_smallest_rung_that_holds_it(most):
    ladder = batch_ladder(most)
    assert ladder[-1] == most
    assert list(ladder) == sorted(set(ladder))
    for size in range(1, most + 1):
        chosen = rung(ladder, size)
        assert chosen >= size
        assert all(other < size or other >= chosen for other in ladder)


def test_padding_stays_small_and_rungs_stay_few():
    ladder = batch_ladder(256)
    assert len(ladder) <= 20
    assert max(rung(ladder, size) / size for size in range(40, 257)) < 1.25
