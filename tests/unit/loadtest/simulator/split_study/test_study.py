"""The study from end to end on a small fleet: resumed cell by cell, tables and ratios from what is kept."""

from __future__ import annotations

import json

import pytest

from loadtest.rig.command_line import call
from loadtest.simulator.outcome import Targets
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import from_trace
from loadtest.simulator.simulation import AUTO, STATIC
from loadtest.simulator.split_study import __main__ as command
from loadtest.simulator.split_study.cells import Loads
from loadtest.simulator.split_study.runs import Runs
from loadtest.simulator.split_study.scenarios import settled_after
from loadtest.simulator.split_study.systems import Run, System
from loadtest.workloads.trace import TraceRequest
from shared.errors import ConfigError
from tests.unit.loadtest.simulator.setups import HEAD

SMALL = [
    "--cells",
    "short",
    "--workers",
    "2",
    "--seconds",
    "1",
    "--loads",
    "0.7",
    "--targets",
    "balanced",
    "--lives",
    "0",
]


@pytest.mark.slow
def test_a_cell_compares_auto_with_the_best_static_system_and_its_runs_are_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "commit", lambda: "c0ffee")
    out, kept = tmp_path / "study.json", tmp_path / "runs.jsonl"
    arguments = [*SMALL, "--limits", "--out", str(out), "--runs", str(kept)]
    call(command.main, arguments)
    printed = capsys.readouterr().out
    study = json.loads(out.read_text())
    row = study["cells"]["short, balanced, 0.7"]
    assert row["ratio"] == pytest.approx(row["auto"]["goodput"] / row["best"]["goodput"])
    assert row["ratio_by_time"] == pytest.approx(row["auto"]["goodput"] / row["by_time"]["goodput"])
    assert row["best"]["goodput"] == max(run["goodput"] for run in row["tried"])
    assert "collocated, paced" not in [run["system"] for run in row["tried"]]
    assert row["auto"]["offered"] == pytest.approx(row["best"]["offered"]), "the same requests"
    assert f"mean {row['ratio']:.3f}" in printed
    limit = study["limits"]["short, balanced"]
    assert min(limit["auto"], limit["best"], limit["by_time"]) > row["auto"]["offered"], "0.7 of it is served"
    assert [one["name"] for one in study["results"]] == [
        "short, balanced, 0.7 best static: goodput",
        "short, balanced, 0.7 by time: goodput",
        "short, balanced, 0.7 auto: goodput",
        "short, balanced auto: limit",
    ]

    lines = kept.read_text()
    call(command.main, arguments)
    assert kept.read_text() == lines, "what is known is not run again"
    assert capsys.readouterr().out == printed

    call(command.main, [*SMALL, "--runs", str(kept), "--seed", "1", "--searched-seed", "0"])
    fresh = [json.loads(line) for line in kept.read_text().removeprefix(lines).splitlines()]
    assert [one["seed"] for one in fresh] == [1, 1, 1]
    assert sorted(one["system"] for one in fresh) == sorted([AUTO, "collocated, paced", row["best"]["system"]])
    (capacity,) = [one["capacity"] for one in map(json.loads, lines.splitlines()) if "capacity" in one]
    assert [one["rate"] for one in fresh] == [pytest.approx(0.7 * capacity, rel=1e-4)] * 3


def test_a_seed_without_a_search_is_named(tmp_path):
    with pytest.raises(ConfigError) as wrong:
        call(command.main, [*SMALL, "--runs", str(tmp_path / "none.jsonl"), "--seed", "1", "--searched-seed", "0"])
    assert wrong.value.field == "searched_seed"
    assert "short, balanced" in str(wrong.value)


def test_of_mode_auto_the_runs_of_other_code_do_not_count(tmp_path):
    path, key = tmp_path / "runs.jsonl", {"workload": "short", "rate": 3.0}
    auto, split = System(AUTO), System(STATIC, 3)
    runs_of = {system: Run(system.name, 3.0, 2.0, 0.0, 0.1, 0.01, 1.0) for system in (auto, split)}
    for code, system in (("old", auto), ("new+", auto), ("old", split)):
        Runs(path, code).add(key, system, runs_of[system])
    now = Runs(path, "new+")
    assert now.find(key, auto) is None
    assert now.find(key, split) == runs_of[split]
    assert Runs(path, "old").find(key, auto) == runs_of[auto]
    assert now.find({**key, "rate": 4.0}, System(STATIC, 3)) is now.find(key, System(STATIC, 4)) is None
    now.add_capacity(key, 7.0, [System(STATIC, 3)])
    assert Runs(path, "other").capacity(key) == (7.0, [System(STATIC, 3)])


def test_wrong_arguments_are_named():
    for flags, field in ((["--cells", "azure"], "cells"), (["--loads", "x"], "loads")):
        with pytest.raises(ConfigError) as wrong:
            call(command.main, flags)
        assert wrong.value.field == field


def test_loads_have_the_rate_and_the_length_that_they_are_asked_for():
    loads = Loads({"mooncake": HEAD}, seconds=60.0)
    for workload in ("balanced", "mooncake"):
        requests = loads.requests(workload, 20.0)
        assert len(requests) >= 1200
        assert len(requests) / (requests[-1].at_s - requests[0].at_s) == pytest.approx(20.0, rel=0.1)
        assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    runs = [run for one in requests for run in one.hash_ids]
    assert len(set(runs)) < len(runs), "prefixes are shared"
    assert loads.targets("balanced", "mooncake").ttft_s > loads.targets("balanced", "balanced").ttft_s


def test_a_change_is_over_with_the_first_window_from_which_on_goodput_holds():
    targets = Targets(1.0, 0.1)
    requests = from_trace([TraceRequest(at / 2, 10, 2) for at in range(120)], 1.0, PrefixIndex(512, 16))
    for request in requests:
        late_s = 5.0 if 20.0 <= request.at_s < 32.0 else 0.5
        request.first_token_s = request.finished_s = request.at_s + late_s
    assert not targets.met_by(requests[50])
    assert settled_after(requests, targets, 20.0, 40.0, goodput=1.8) == 15.0
    assert settled_after(requests, targets, 20.0, 40.0, goodput=2.5) == 40.0
