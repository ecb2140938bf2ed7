"""The comparison of systems on real clusters, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.baseline import study
from loadtest.baseline.cli import baseline
from loadtest.baseline.systems import SYSTEMS
from loadtest.rig.command_line import call

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.mark.slow
def test_systems_are_measured_under_both_workloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two = (SYSTEMS[0], SYSTEMS[2])
    monkeypatch.setattr(study, "SYSTEMS", two)
    out = tmp_path / "out"
    arguments = ["--model", str(DEMO), "--duration", "1s", "--rate", "2", "--max-points", "1", "--chunks", "256"]
    workload = ["--scale", "64", "--scale-output", "64", "--slo", "ttft=30s,tpot=5s", "--num-kv-blocks", "2048"]
    places = ["--out", str(out), "--json", str(tmp_path / "figures.json")]
    assert call(baseline, [*arguments, *workload, *places]) == 0
    text = (out / "outcome.md").read_text()
    for workload_name in ("trace", "long-prompts"):
        assert f"## {workload_name}" in text
        assert (out / workload_name / "report.html").exists()
        for system in two:
            assert (out / workload_name / f"{system.name}-chunk-256" / "sweep.json").exists()
    assert text.count("| 256 |") == 4
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {"machine", "commit", "results"} <= figures.keys()
    goodput = [result for result in figures["results"] if result["name"].endswith("max goodput")]
    assert [result["name"].split(", ")[0] for result in goodput] == ["trace"] * 2 + ["long-prompts"] * 2
    assert all(result["value"] > 0 and result["unit"] == "req/s" for result in goodput)
    assert [result.get("peer") for result in goodput] == [two[1].title, None] * 2
