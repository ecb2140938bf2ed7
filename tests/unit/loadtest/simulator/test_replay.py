"""A load test's requests, simulated: what agrees has ratios of 1, what is slower shows."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtest.records import Failure, FailureCause, RequestRecord
from loadtest.rig.command_line import call
from loadtest.run_folder import REQUESTS, write_requests
from loadtest.simulator.outcome import Targets
from loadtest.simulator.replay import recorded, replay
from loadtest.simulator.simulation import Setup, play, two_pools
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.slo import Slo
from loadtest.workloads.trace import TraceRequest
from services.router.placement.settings import PlacementSettings
from shared.errors import ConfigError
from shared.sizing.step_time import StepTimes
from tests.unit.loadtest.factories import answered
from tests.unit.loadtest.simulator.setups import spec

TIMES = StepTimes(fixed_s=0.01, read_s=0.02, token_s=1e-4, sequence_s=1e-4, kv_s=1e-6, attention_s=1e-8)


def load_test(folder: Path, slower: float = 1.0) -> None:
    """Writes what a load test of two workers would, whose times are those simulated, or `slower` times as long."""
    trace = [TraceRequest(0.1 * number, 50 + 7 * number, 2 + number % 9) for number in range(40)]
    worker = spec(2000, block_size=16, times=TIMES, max_num_batched_tokens=512, max_num_seqs=64, output_quantile=0.75)
    config = TandemConfig(ttft_target_s=math.inf, placement=PlacementSettings().config(2048))
    played = play(trace, 1.0, "static", Setup(two_pools(1, 1, worker), Targets(1e9, 1e9), tandem=config))
    records = []
    for one in played:
        times_s = [one.at_s + slower * one.ttft_s, one.at_s + slower * (one.finished_s - one.at_s)]
        record = answered(one.number, sent_s=one.at_s, times_s=times_s, counts=[1, one.num_output_tokens - 1])
        record.num_prompt_tokens = one.num_prompt_tokens
        records.append(record)
    records.append(RequestRecord(len(played), "never-sent", 50, 2, failure=Failure(FailureCause.INTERRUPTED, "")))
    folder.mkdir()
    write_requests(folder / REQUESTS, records)


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_the_ratio_says_how_far_the_simulation_is_off(tmp_path, slower, capsys):
    load_test(tmp_path / "run", slower)
    steps, out = tmp_path / "steps.json", tmp_path / "out.json"
    steps.write_text(json.dumps({"step_times": asdict(TIMES)}))
    call(replay, ["--run", str(tmp_path / "run"), "--steps", str(steps), "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert len(results) == 8
    for row in results:
        assert row["ratio"] == pytest.approx(1 / slower, rel=0.01), row["name"]
    assert "40 requests, 40 answered, 40 in the simulation" in capsys.readouterr().out


def test_with_a_target_the_shares_in_time_are_compared(tmp_path):
    load_test(tmp_path / "run", slower=1.25)
    in_time = recorded(tmp_path / "run", Slo(0.07)).num_in_time
    assert 20 < in_time < 40
    steps, out = tmp_path / "steps.json", tmp_path / "out.json"
    steps.write_text(json.dumps({"step_times": asdict(TIMES)}))
    call(replay, ["--run", str(tmp_path / "run"), "--steps", str(steps), "--ttft", "0.07", "--out", str(out)])
    row = json.loads(out.read_text())["results"][-1]
    assert (row["name"], row["ratio"]) == ("in time", pytest.approx(40 / in_time)), "all are in the simulation"


def test_a_folder_without_answers_is_refused(tmp_path):
    with pytest.raises(ConfigError) as wrong:
        recorded(tmp_path)
    assert wrong.value.field == "run"
    for text in ("", "{}\n", "no JSON\n"):
        (tmp_path / REQUESTS).write_text(text)
        with pytest.raises(ConfigError) as wrong:
            recorded(tmp_path)
        assert wrong.value.field == "run"
