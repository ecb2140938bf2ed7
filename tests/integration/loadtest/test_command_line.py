"""`python -m loadtest` as people call it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.cli import main
from tests.integration.loadtest.conftest import REPOSITORY, StartFake
from tests.integration.loadtest.fake_script import Behaviour
from tests.waiting import DEADLINE_S

QUICK = Behaviour(messages=((10, 1), (5, 1), (5, 1)))
"""Of the time: where one request in a hundred finds the core taken, the 99th percentile is the machine's."""
WORKLOAD = ("--workload", "fixed:input=16,output=3")
SLO = ("--slo", "ttft=400ms,tpot=200ms", "--max-lag", "2s")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "loadtest", *arguments]


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    status: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["loadtest", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        status = left.value.code
        assert isinstance(status, int)
        return Done(status, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_a_run_writes_its_three_files(start_fake: StartFake, call: Call, tmp_path: Path) -> None:
    server = start_fake(QUICK)
    out = tmp_path / "run"
    done = call("run", "--target", server.http, *WORKLOAD, *SLO, "--rate", "20", "--duration", "1", "--out", str(out))
    assert done.status == 0, done.stderr
    assert "goodput" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "requests.jsonl", "summary.json"]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["offered"], summary["attainment"], summary["config"]["seed"]) == (20, 1.0, summary["seed"])
    again = call("run", "--target", server.http, *WORKLOAD, "--rate", "1", "--duration", "1", "--out", str(out))
    assert (again.status, "already holds summary.json" in again.stderr) == (2, True)


@pytest.mark.slow
def test_a_sweep_finds_the_limit_of_a_queue(start_fake: StartFake, call: Call, tmp_path: Path) -> None:
    for name, service_ms in (("quick", 12.5), ("slow", 25.0)):
        server = start_fake(QUICK, service_ms=service_ms)
        search = ("--rate", "40", "--arrivals", "constant", "--num-requests", "64", "--tolerance", "40", "--seed", "3")
        done = call(
            "sweep", "--target", server.http, *WORKLOAD, *SLO, *search, "--label", name, "--out", str(tmp_path / name)
        )
        assert done.status == 0, done.stderr
    # Constant arrivals: above 1000 / service_ms a second the queue grows, and too few requests come to fill it above
    # some 170 and 55 a second.
    limits = {
        name: json.loads((tmp_path / name / "sweep.json").read_text())["max_goodput"] for name in ("quick", "slow")
    }
    assert 80 <= limits["quick"]["rate"] <= 240
    assert 40 <= limits["slow"]["rate"] <= 60
    assert (tmp_path / "quick" / "rate-40" / "report.html").exists()


@pytest.mark.slow
def test_ctrl_c_writes_what_was_measured(start_fake: StartFake, tmp_path: Path) -> None:
    server = start_fake(QUICK)
    out = tmp_path / "run"
    arguments = command(
        "run", "--target", server.http, *WORKLOAD, *SLO, "--rate", "20", "--duration", "600", "--out", str(out)
    )
    process = subprocess.Popen(
        arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    first = process.stderr.readline()  # comes when the run is well under way
    assert "sent" in first
    assert "goodput so far" in first
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert "PARTIAL: stopped by the user" in stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["partial"]
    assert summary["completed"] > 0
    assert "stopped by the user" in (out / "report.html").read_text()


def test_bad_input_is_one_clear_line(call: Call, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\noops\n')
    base = ("run", "--target", "grpc://127.0.0.1:1", "--rate", "1", "--duration", "1", "--out", str(tmp_path / "out"))
    for arguments, message in (
        (("--workload", "poem"), "error: unknown workload 'poem'; known are fixed"),
        (("--workload", f"mooncake:{trace}"), f"error: {trace}, line 2: not JSON"),
        ((*WORKLOAD, "--slo", "ttft=200,tpot=30ms"), "error: ttft=200 has no unit: write ttft=200ms"),
        ((*WORKLOAD, "--concurrency", "3"), "error: concurrency is a closed loop"),
        ((*WORKLOAD, "--seed", "-1"), "error: seed must be between 0"),
        ((*WORKLOAD, "--api-key-file", str(tmp_path / "none")), "error: cannot read"),
    ):
        done = call(*base, *arguments)
        assert done.status == 2
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists(), "nothing is made before the input is known to be right"


def test_a_target_that_is_down_is_one_clear_line(call: Call, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    target = f"http://127.0.0.1:{port}"
    arguments = (*WORKLOAD, "--rate", "1", "--duration", "1", "--out", str(tmp_path / "out"))
    done = call("run", "--target", target, *arguments)
    assert done.status == 2
    assert done.stderr == f"error: {target} does not serve: cannot connect to 127.0.0.1:{port}: Connection refused\n"
