"""The comparison of systems on real clusters, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.baseline import study
from loadtest.baseline.systems import SYSTEMS
from loadtest.cli import app

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_systems_are_measured_under_both_workloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "SYSTEMS", SYSTEMS[:2])
    out = tmp_path / "out"
    arguments = ["--model", str(DEMO), "--duration", "2s", "--rate", "1", "--max-points", "1", "--chunks", "256"]
    workload = ["--scale", "64", "--scale-output", "64", "--slo", "ttft=30s,tpot=5s", "--num-kv-blocks", "2048"]
    done = CliRunner().invoke(app, ["baseline", *arguments, *workload, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = (out / "outcome.md").read_text()
    for workload_name in ("trace", "long-prompts"):
        assert f"## {workload_name}" in text
        assert (out / workload_name / "report.html").exists()
        for system in SYSTEMS[:2]:
            assert (out / workload_name / f"{system.name}-chunk-256" / "sweep.json").exists()
    assert text.count("| 256 |") == 4
