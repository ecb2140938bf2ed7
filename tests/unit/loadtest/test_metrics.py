"""The definitions, by example and by property."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.metrics import (
    distribution,
    goodput,
    inter_token_s,
    is_good,
    num_output_tokens,
    request_metrics,
)
from loadtest.records import FailureCause, RequestRecord
from tests.unit.loadtest.factories import SLO, answered, broken

messages = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 8)), min_size=1, max_size=12)


def record_of(gaps: list[tuple[float, int]], sent_s: float) -> RequestRecord:
    times = sent_s + np.cumsum([gap for gap, _ in gaps])
    return answered(sent_s=sent_s, times_s=[float(t) for t in times], counts=[count for _, count in gaps])


def test_a_message_of_several_tokens_counts_them_all_and_only_the_first_waited() -> None:
    record = answered(times_s=[0.1, 0.4], counts=[2, 3])
    found = request_metrics(record)
    assert found is not None
    assert found.num_output_tokens == 5
    assert found.tpot_s == pytest.approx(0.3 / 4)
    assert inter_token_s(record) == pytest.approx([0.0, 0.3, 0.0, 0.0])


def test_one_token_has_no_tpot_and_meets_its_target() -> None:
    record = answered(times_s=[0.1])
    found = request_metrics(record)
    assert found is not None
    assert found.tpot_s is None
    assert inter_token_s(record) == []
    assert is_good(record, SLO)


def test_without_token_ids_the_count_is_the_usages() -> None:
    record = answered(times_s=[0.1, 0.5])
    record.reply.counts_exact = False
    record.reply.num_output_tokens = 11
    found = request_metrics(record)
    assert found is not None
    assert num_output_tokens(record) == 11
    assert found.tpot_s == pytest.approx(0.04)


def test_a_failed_request_has_no_figures_even_with_some_tokens() -> None:
    record = answered()
    record.failure = broken().failure
    assert request_metrics(record) is None
    assert not is_good(record, SLO)


@settings(max_examples=40)
@given(messages, st.floats(0, 1000))
def test_gaps_are_one_less_than_tokens_and_sum_to_the_time_between_first_and_last(
    gaps: list[tuple[float, int]], sent_s: float
) -> None:
    record = record_of(gaps, sent_s)
    found, between = request_metrics(record), inter_token_s(record)
    assert found is not None
    assert len(between) == found.num_output_tokens - 1 == sum(count for _, count in gaps) - 1
    assert sum(between) == pytest.approx(found.e2e_s - found.ttft_s, abs=1e-6)
    assert all(gap >= 0 for gap in between)
    if found.tpot_s is not None:
        assert found.tpot_s * (found.num_output_tokens - 1) == pytest.approx(sum(between), abs=1e-6)
        assert found.tpot_s == pytest.approx(np.mean(between), abs=1e-6)


def test_percentiles_interpolate_between_neighbours() -> None:
    found = distribution([1.0, 2.0, 3.0, 4.0])
    assert found is not None
    assert (found.p50, found.p90) == (2.5, pytest.approx(3.7))
    assert distribution([]) is None


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["good", "late", "slow", "failed", "interrupted"]), max_size=20))
def test_goodput_counts_every_miss_and_leaves_out_what_was_interrupted(kinds: list[str]) -> None:
    made = {
        "good": lambda i: answered(i, times_s=[0.2, 0.23]),
        "late": lambda i: answered(i, times_s=[0.21, 0.22]),
        "slow": lambda i: answered(i, times_s=[0.1, 0.131]),
        "failed": lambda i: broken(i),
        "interrupted": lambda i: broken(i, FailureCause.INTERRUPTED),
    }
    records = [made[kind](i) for i, kind in enumerate(kinds)]
    found = goodput(records, SLO, window_s=4.0)
    offered = [kind for kind in kinds if kind != "interrupted"]
    assert (found.num_good, found.num_offered) == (kinds.count("good"), len(offered))
    assert found.rate == kinds.count("good") / 4.0
    assert found.attainment == (kinds.count("good") / len(offered) if offered else 0.0)
