"""The study from end to end on a small fleet: resumed cell by cell, tables and ratios from what is kept."""

from __future__ import annotations

import json

import pytest

from loadtest.rig.command_line import call
from loadtest.simulator.outcome import Targets
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import from_trace
from loadtest.simulator.split_study.__main__ import main
from loadtest.simulator.split_study.cells import Loads
from loadtest.simulator.split_study.scenarios import settled_after
from loadtest.workloads.trace import TraceRequest
from shared.errors import ConfigError
from tests.unit.loadtest.simulator.setups import HEAD

SMALL = ["--cells", "short", "--workers", "2", "--seconds", "1", "--loads", "0.7", "--targets", "balanced"]


@pytest.mark.slow
def test_a_cell_compares_auto_with_the_best_fixed_system_and_is_kept(tmp_path, capsys):
    out = tmp_path / "study.json"
    call(main, [*SMALL, "--out", str(out)])
    printed = capsys.readouterr().out
    kept = json.loads(out.read_text())
    row = kept["cells"]["short, balanced, 0.7"]
    assert row["ratio"] == pytest.approx(row["auto"]["goodput"] / row["best"]["goodput"])
    assert row["best"]["goodput"] == max(run["goodput"] for run in row["tried"])
    assert row["auto"]["offered"] == pytest.approx(row["best"]["offered"]), "the same requests"
    assert f"mean {row['ratio']:.3f}" in printed
    assert [one["name"] for one in kept["results"]] == [
        "short, balanced, 0.7 best fixed: goodput",
        "short, balanced, 0.7 auto: goodput",
    ]
    marked = {**kept, "cells": {"short, balanced, 0.7": {**row, "ratio": 7.0}}}
    out.write_text(json.dumps(marked))
    call(main, [*SMALL, "--out", str(out), "--continue"])
    assert "mean 7.000" in capsys.readouterr().out, "a cell that is known is not run again"


@pytest.mark.slow
def test_auto_alone_is_run_anew_beside_the_fixed_systems_that_are_kept(tmp_path):
    out = tmp_path / "study.json"
    call(main, [*SMALL, "--out", str(out)])
    kept = json.loads(out.read_text())
    row = kept["cells"]["short, balanced, 0.7"]
    spoilt = {**row, "auto": {**row["auto"], "goodput": 1.0}, "ratio": 7.0}
    out.write_text(json.dumps({**kept, "cells": {"short, balanced, 0.7": spoilt, "azure, tpot, 0.7": row}}))
    call(main, [*SMALL, "--out", str(out), "--anew"])
    cells = json.loads(out.read_text())["cells"]
    found = cells["short, balanced, 0.7"]
    assert {**found, "auto": {**found["auto"], "cpu_s": row["auto"]["cpu_s"]}} == row
    assert cells["azure, tpot, 0.7"] == row, "it was not asked for"


def test_wrong_arguments_are_named():
    for flags, field in ((["--cells", "azure"], "cells"), (["--continue"], "continue"), (["--loads", "x"], "loads")):
        with pytest.raises(ConfigError) as wrong:
            call(main, flags)
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
