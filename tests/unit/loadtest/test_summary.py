"""`summary.json` and `requests.jsonl`."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.records import FailureCause, TtftSplit
from loadtest.results import prepare_folder
from loadtest.rig.results import write_json
from loadtest.slo import Slo
from loadtest.summary import summarize
from shared.errors import ConfigError
from tests.unit.loadtest.factories import answered, broken, result

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
