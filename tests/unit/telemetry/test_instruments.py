"""Counters and histograms that a service records in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.telemetry.buckets import BucketCounts
from shared.telemetry.instruments import Counter, Histogram

BOUNDS = (0.1, 1.0, 10.0)


def test_sums_are_kept_by_label_and_grow() -> None:
    tally = Counter()
    tally.add(2, "a", "here")
    tally.add(0, "b", "here")
    before = tally.read()
    tally.add(3, "a", "here")
    assert before == {("a", "here"): 2, ("b", "here"): 0}
    assert tally.read() == {("a", "here"): 5, ("b", "here"): 0}


@given(st.lists(st.floats(0, 100)))
def test_each_value_lies_in_every_bucket_up_to_whose_bound_it_reaches(values: list[float]) -> None:
    counts = BucketCounts(BOUNDS)
    for value in values:
        counts.add(value)
    assert counts.cumulative() == [*(sum(value <= bound for value in values) for bound in BOUNDS), len(values)]
    assert counts.total == pytest.approx(sum(values))


def test_a_weight_counts_a_value_so_many_times() -> None:
    counts = BucketCounts(BOUNDS)
    counts.add(0.5, 7)
    counts.add(20.0, 0)
    assert (counts.cumulative(), counts.total) == ([0, 7, 7, 7], 3.5)


def test_a_histogram_has_a_series_for_each_label_that_was_seen() -> None:
    sizes = Histogram(BOUNDS)
    sizes.record(0.1, "small")
    sizes.record(5.0, "large")
    sizes.record(6.0, "large")
    assert {labels: series.cumulative() for labels, series in sizes.read().items()} == {
        ("small",): [1, 1, 1, 1],
        ("large",): [0, 0, 2, 2],
    }
