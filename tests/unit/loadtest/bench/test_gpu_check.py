"""The GPU check keeps what each step found at once, ends within its minutes, and continues where a call ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.__main__ import BENCHMARKS
from loadtest.bench.gpu_check import __main__ as gpu_check
from loadtest.bench.gpu_check.__main__ import EXIT_FAILED, EXIT_LEFT, check, main
from loadtest.bench.gpu_check.record import CheckRecord
from loadtest.bench.gpu_check.steps import CheckStep, step_figures, step_log, steps
from loadtest.rig.command_line import call
from shared.errors import ConfigError
from tests.unit.local.processes import wait_for_end
from tests.waiting import until

NO_GPU = {"gpu": None}
CALL_MINUTES, MOST_CALLS, MOST_FILES = 9.5, 2, 6
"""A command's time, how many commands a machine is there for, and the files that it may bring back."""


def python(name: str, code: str, minutes: float = 1.0, **needs: Any) -> CheckStep:
    return CheckStep(name, (sys.executable, "-c", code), minutes, gpu=False, **needs)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "new").mkdir()
    return tmp_path / "new" / "check.json"


def report(out: Path) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in json.loads(out.read_text())["steps"]}


def test_steps_behind_a_failure_are_run_and_all_are_in_the_report(out: Path) -> None:
    planned = [
        python("fails", "print('to the end'); raise SystemExit(3)"),
        python("writes", f"open({str(step_figures(out))!r}, 'w').write('[1.5]')"),
        CheckStep("is not there", ("/nowhere/at-all",), 1, gpu=False),
        CheckStep("needs a GPU", ("true",), 1),
        python("needs a program", "", program="no-such-program"),
        python("needs packages", "", packages=("json", "no_such_package", "nor_this")),
        python("sees", f"import json; print(len(json.load(open({str(out)!r}))['steps']), 'before')"),
    ]
    assert check(planned, CheckRecord(out, NO_GPU), 60) == []
    found = report(out)
    assert {name: step["outcome"] for name, step in found.items()} == {
        "fails": "failed", "writes": "passed", "is not there": "failed", "needs a GPU": "skipped",
        "needs a program": "skipped", "needs packages": "skipped", "sees": "passed",
    }  # fmt: skip
    assert (found["fails"]["exit_code"], found["fails"]["output"]) == (3, "to the end\n")
    assert found["writes"]["figures"] == [1.5]
    assert (found["sees"]["output"], found["sees"]["figures"]) == ("6 before\n", None)
    assert found["needs a GPU"]["output"] == "torch sees no CUDA device"
    assert found["needs a program"]["output"] == "no-such-program is not installed"
    assert found["needs packages"]["output"] == "not installed: no_such_package, nor_this"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_step_that_no_longer_fits_is_left_and_a_shorter_one_behind_it_runs(out: Path) -> None:
    planned = [python("one", "pass", 1), python("long", "pass", 4), python("two", "pass", 1)]
    record = CheckRecord(out, NO_GPU)
    assert check(planned, record, minutes=2.5) == ["long"]
    assert list(report(out)) == ["one", "two"]
    assert check(planned, CheckRecord.load(out), minutes=5) == []
    assert list(report(out)) == ["one", "two", "long"]


@pytest.mark.slow
def test_a_step_past_its_limit_ends_with_its_children_and_keeps_its_figures(out: Path) -> None:
    pid_file = out.parent / "pid"
    code = (
        "import subprocess, sys, time\n"
        "print('begun', flush=True)\n"
        f"open({str(step_figures(out))!r}, 'w').write('[7]')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    assert check([python("slow", code, minutes=0.5), python("quick", "pass")], CheckRecord(out, NO_GPU), 60) == []
    slow, quick = report(out).values()
    assert (slow["outcome"], slow["exit_code"], slow["output"]) == ("too long", None, "begun\n")
    assert slow["figures"] == [7]
    assert quick["outcome"] == "passed"
    assert wait_for_end(int(pid_file.read_text()))


HANGS = """
import os, sys, time
open({figures!r}, "w").write("[2.5]")
print("half way", flush=True)
open({pid!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
CALL = """
import sys
from pathlib import Path
from loadtest.bench.gpu_check.__main__ import check
from loadtest.bench.gpu_check.record import CheckRecord
from loadtest.bench.gpu_check.steps import CheckStep

record = CheckRecord.load(Path({out!r}))
record.machine = {{"gpu": None}}
check([
    CheckStep("first", (sys.executable, "-c", "print('once')"), 1, gpu=False),
    CheckStep("hangs", (sys.executable, "-c", {hangs!r}), 1, gpu=False),
    CheckStep("last", (sys.executable, "-c", "pass"), 1, gpu=False),
], record, 60)
"""


def test_a_call_killed_in_a_step_leaves_its_figures_and_the_next_one_goes_on_with_it(out: Path) -> None:
    pid_file = out.parent / "pid"
    hangs = HANGS.format(figures=str(step_figures(out)), pid=str(pid_file))
    for number in (1, 2):
        pid_file.unlink(missing_ok=True)
        calling = subprocess.Popen([sys.executable, "-c", CALL.format(out=str(out), hangs=hangs)])
        asyncio.run(until(lambda: pid_file.exists() and pid_file.read_text() != ""))
        os.kill(calling.pid, signal.SIGKILL)
        calling.wait()
        assert wait_for_end(int(pid_file.read_text())), "the step went on without its call"
        record = CheckRecord.load(out)
        assert list(record.outcomes) == ["first", "hangs"]
        cut = record.outcomes["hangs"]
        assert (cut.outcome, cut.starts, cut.figures, cut.output) == ("cut off", number, [2.5], "half way\n")
        assert cut.is_final == (number == 2)
    # Cut off twice, it may be what ends the call: the steps behind it have their turn.
    assert subprocess.run([sys.executable, "-c", CALL.format(out=str(out), hangs=hangs)], check=True)
    assert {name: step["outcome"] for name, step in report(out).items()} == {
        "first": "passed", "hangs": "cut off", "last": "passed",
    }  # fmt: skip
    assert not step_log(out).exists()


def test_what_is_no_report_is_refused_and_kept(out: Path) -> None:
    out.write_text('{"steps": []}')
    with pytest.raises(ConfigError, match="is no report of this check"):
        CheckRecord.load(out)
    assert out.read_text() == '{"steps": []}'


def test_the_steps_keep_to_a_machines_time_and_name_what_exists(tmp_path: Path) -> None:
    planned = steps(tmp_path / "check.json")
    assert all(0 < step.minutes <= CALL_MINUTES / 2 for step in planned)
    assert len({step.name for step in planned}) == len(planned)
    for step in planned:
        command = list(step.command)
        if "loadtest.bench" in command:
            assert command[command.index("loadtest.bench") + 1] in BENCHMARKS
    order = [step.name for step in planned]
    assert order[:6] == ["limits", "smoke", "engine", "mixed", "kernels", "tests"]
    named = {Path(part).name for step in planned for part in step.command if str(tmp_path) in part}
    assert len({*named, "check.json", "check-step.log"}) <= MOST_FILES


def test_two_calls_are_enough_for_all_steps_at_their_limits(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def take_the_whole_limit(step: CheckStep, record: CheckRecord) -> Any:
        now[0] += 60 * step.minutes
        begun = record.begin(step.name, "")
        return record.end(begun, "passed", 60 * step.minutes, 0)

    monkeypatch.setattr(gpu_check, "run", take_the_whole_limit)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(CheckStep, "missing", lambda *_: "")
    left = ["all"]
    num_calls = 0
    while left:
        begin = now[0]
        left = check(steps(out), CheckRecord(out, {"gpu": "one"}) if not out.exists() else CheckRecord.load(out), 9.5)
        num_calls += 1
        assert now[0] - begin <= 60 * CALL_MINUTES
    assert num_calls <= MOST_CALLS
    assert len(report(out)) == len(steps(out))


def test_the_exit_code_says_whether_all_passed_and_whether_some_are_left(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = [python("good", "pass"), python("bad", "raise SystemExit(1)"), python("long", "pass", 10)]
    monkeypatch.setattr(gpu_check, "steps", lambda _: planned)
    monkeypatch.setattr(gpu_check, "look", lambda: NO_GPU)
    monkeypatch.setattr(gpu_check.kit, "use", lambda: None)  # one that lies in this checkout
    flags = ["--out", str(out), "--minutes", "8"]
    assert call(main, [*flags, "--only", "good", "long"]) == EXIT_LEFT
    assert list(report(out)) == ["good"]
    assert call(main, flags) == EXIT_FAILED
    assert call(main, [*flags, "--only", "good"]) == 0
    assert call(main, [*flags, "--only", "good", "--fresh"]) == 0
    assert list(report(out)) == ["bad", "good"]
    with pytest.raises(ConfigError, match="--only: 'goo' is not one of good, bad, long"):
        call(main, [*flags, "--only", "goo"])


def test_a_python_without_torch_is_named() -> None:
    with pytest.raises(ConfigError, match="torch does not start with /usr/bin/false"):
        gpu_check.look("/usr/bin/false")
