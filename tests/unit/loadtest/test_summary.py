"""The metrics' definitions, and `summary.json`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.metrics import (
    distribution,
    goodput,
    inter_token_s,
    is_good,
    num_output_tokens,
    request_metrics,
)
from loadtest.records import FailureCause, RequestRecord, TtftSplit
from loadtest.rig.results import write_json
from loadtest.run_folder import prepare_folder
from loadtest.slo import Slo
from loadtest.summary import summarize
from shared.errors import ConfigError
from tests.examples import examples
from tests.unit.loadtest.factories import SLO, answered, broken, result

VLLM_KEYS = {
    *("date", "backend", "endpoint_type", "label", "model_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}
"""What `vllm bench serve --save-result` writes without --save-detailed."""


def test_the_keys_that_vllm_has_are_there() -> None:
    assert set(summarize(result([answered()]))) >= VLLM_KEYS


def test_the_figures_follow_from_the_records() -> None:
    records = [
        answered(0, sent_s=0.0, times_s=[0.1, 0.12], due_s=-0.001),
        answered(1, sent_s=1.0, times_s=[1.5, 1.51], counts=[1, 3]),
        broken(2),
        broken(3, FailureCause.INTERRUPTED),
    ]
    found = summarize(result(records))
    assert (found["completed"], found["failed"], found["offered"], found["interrupted"]) == (2, 1, 3, 1)
    assert (found["good"], found["attainment"]) == (1, pytest.approx(1 / 3))
    assert (found["goodput"], found["request_goodput"]) == (pytest.approx(0.1), pytest.approx(1 / 12))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (200, 6)
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["max_tpot_ms"] == pytest.approx(20)
    assert found["failures"] == {"overloaded": 1}
    assert found["failure_examples"]["overloaded"] == {"kind": "Kind", "message": "said so"}
    assert (found["total_cached_tokens"], found["cached_share"]) == (50, 0.25)
    assert found["schedule_lag_ms"]["max"] == pytest.approx(1.0)
    assert found["max_output_tokens_per_s"] == 4
    assert not found["invalid"]
    assert not found["partial"]


def test_a_generator_that_fell_behind_makes_the_run_invalid() -> None:
    late = [answered(i, sent_s=1.0, times_s=[1.1, 1.12], due_s=0.95) for i in range(10)]
    found = summarize(result(late))
    assert found["invalid"]
    assert found["invalid_reasons"] == ["the generator fell behind its schedule: lag p99 50.0 ms, limit 10 ms"]
    assert not summarize(result(late, slo=Slo(1.5)))["invalid"], "5 % of a TTFT target of 1.5 s are 75 ms"


def test_the_servers_split_is_summed_up() -> None:
    records = [answered(i, split=TtftSplit(queue_ms=float(i), ttft_ms=5.0)) for i in range(3)]
    found = summarize(result(records))["ttft_split_ms"]
    assert found["queue_ms"] == {"mean": 1.0, "p50": 1.0, "p99": pytest.approx(1.98)}
    assert summarize(result([answered()]))["ttft_split_ms"] == {}


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    prepare_folder(folder)
    write_json(folder / "summary.json", {})
    with pytest.raises(ConfigError, match=r"already holds summary\.json"):
        prepare_folder(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        prepare_folder(tmp_path / "file")


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


@examples(40)
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


@examples(40)
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
