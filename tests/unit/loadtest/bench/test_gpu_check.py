"""The GPU check goes on after a step that fails or takes too long, and its report is written after each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench import gpu_check
from loadtest.bench.__main__ import BENCHMARKS
from loadtest.bench.gpu_check import CheckStep, check, main, steps
from loadtest.rig.command_line import call
from tests.unit.local.processes import wait_for_end


def python(name: str, code: str, minutes: float = 1.0) -> CheckStep:
    return CheckStep(name, (sys.executable, "-c", code), minutes)


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    folder = tmp_path / "figures"
    folder.mkdir()
    return folder


def report(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out.read_text())["steps"]
    return found


def test_steps_behind_a_failure_are_run_and_all_are_in_the_report(tmp_path: Path, figures: Path) -> None:
    out = tmp_path / "new" / "check.json"
    planned = [
        python("fails", "print('to the end'); raise SystemExit(3)"),
        python("writes", f"open({str(figures / 'rates.json')!r}, 'w').write('[1.5]')"),
        CheckStep("is not there", ("/nowhere/at-all",), 1),
        CheckStep("needs more", ("true",), 1, needs="no-such-program"),
        CheckStep("needs a package", ("true",), 1, package="no_such_package"),
        python("sees", f"import json; print(len(json.load(open({str(out)!r}))['steps']), 'before')"),
    ]
    check(planned, out, figures)
    found = {item["name"]: item for item in report(out)}
    assert [item["outcome"] for item in found.values()] == [
        "failed", "passed", "failed", "skipped", "skipped", "passed",
    ]  # fmt: skip
    assert (found["fails"]["exit_code"], found["fails"]["output"]) == (3, "to the end\n")
    assert found["writes"]["figures"] == {"rates": [1.5]}
    assert found["sees"]["output"] == "5 before\n"
    assert found["sees"]["figures"] is None
    assert "no-such-program" in found["needs more"]["output"]
    assert "no_such_package" in found["needs a package"]["output"]


@pytest.mark.slow
def test_a_step_past_its_limit_ends_with_its_children(tmp_path: Path, figures: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "print('begun', flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    slow, quick = check([python("slow", code, minutes=0.5), python("quick", "pass")], tmp_path / "check.json", figures)
    assert (slow.outcome, slow.exit_code, slow.output) == ("too long", None, "begun\n")
    assert quick.outcome == "passed"
    assert wait_for_end(int(pid_file.read_text()))


def test_every_step_keeps_to_ten_minutes_and_names_what_exists(tmp_path: Path) -> None:
    planned = steps(tmp_path)
    assert all(0 < step.minutes <= gpu_check.MOST_MINUTES for step in planned)
    assert sum(step.minutes for step in planned) <= 70  # limits; most steps need a part of theirs
    assert len({step.name for step in planned}) == len(planned)
    for step in planned:
        command = list(step.command)
        if "loadtest.bench" in command:
            assert command[command.index("loadtest.bench") + 1] in BENCHMARKS
    order = [step.name for step in planned]
    assert order.index("gpu tests") < order.index("kernel bench") < order.index("engine bench") < order.index("tuning")


def test_the_exit_code_says_whether_all_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "steps", lambda _: [python("good", "pass"), python("bad", "raise SystemExit(1)")])
    out = tmp_path / "check.json"
    assert call(main, ["--out", str(out)]) == 1
    assert call(main, ["--out", str(out), "--only", "good"]) == 0
    assert [item["name"] for item in report(out)] == ["good"]
    assert os.path.isdir(tmp_path / "check-figures")
