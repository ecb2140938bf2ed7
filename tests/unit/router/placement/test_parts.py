"""Samples of the workers that prefill and of those that decode."""

from __future__ import annotations

import random

from services.router.placement.parts import Parts
from tests.unit.router.placement.builders import view


def test_a_sample_of_both_kinds_stands_for_all_workers():
    views = [view(f"w{number}") for number in range(12)]
    parts = Parts(views, decoding={f"w{number}" for number in range(4)})
    drawn = parts.draw_weighted(random.Random(1), 4)
    assert len({one.name for one, _ in drawn}) == len(drawn) == 4
    assert sorted(weight for _, weight in drawn) == [2.0, 2.0, 4.0, 4.0]
    assert {weight for one, weight in drawn if one.name in {"w0", "w1", "w2", "w3"}} == {2.0}
    assert [weight for _, weight in Parts(views[:3]).draw_weighted(random.Random(1), 4)] == [1.0] * 3
