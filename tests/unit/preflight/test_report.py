"""The report for people, for programs and for a Pod's status."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from services.preflight.finding import fail, ok, warn
from services.preflight.report import (
    MAX_MESSAGE_BYTES,
    as_json,
    print_finding,
    summary,
    termination_message,
    write_termination_message,
)

FINDINGS = [ok("gpu", "fine"), warn("shm", "little [bold]", "mount more"), fail("redis", "away", "start it")]


def test_a_line_that_is_piped_is_whole_and_its_fix_stands_below() -> None:
    out = io.StringIO()
    for finding in (*FINDINGS, ok("model", "x" * 300)):
        print_finding(Console(file=out, width=80), finding)
    assert out.getvalue().splitlines() == [
        "ok    gpu       fine",
        "warn  shm       little [bold]",
        "                fix: mount more",
        "fail  redis     away",
        "                fix: start it",
        "ok    model     " + "x" * 300,
    ]


def test_a_terminal_wraps_within_the_column() -> None:
    out = io.StringIO()
    print_finding(Console(file=out, width=40, force_terminal=True, color_system=None), fail("redis", "a " * 20, "b"))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[0].startswith("fail  redis     a a")
    assert lines[1].startswith(" " * 16 + "a")
    assert lines[-1] == " " * 16 + "fix: b"


def test_programs_get_one_object() -> None:
    told = json.loads(as_json("worker", FINDINGS))
    assert (told["component"], told["passed"]) == ("worker", False)
    assert told["findings"][1] == {"check": "shm", "level": "warn", "text": "little [bold]", "fix": "mount more"}
    assert json.loads(as_json("worker", FINDINGS[:2]))["passed"]
    assert summary(FINDINGS) == "1 ok, 1 warn, 1 fail"


def test_a_pods_status_gets_what_failed(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    assert write_termination_message(log, FINDINGS) == ""
    assert not log.exists()  # outside of a Pod
    log.touch()
    assert write_termination_message(log, FINDINGS[:2]) == ""
    assert log.read_text() == ""  # nothing has failed
    assert write_termination_message(log, FINDINGS) == ""
    assert log.read_text() == "redis: away. Fix: start it"
    assert "cannot be written" in write_termination_message(tmp_path, FINDINGS)


def test_the_message_is_no_longer_than_kubernetes_keeps() -> None:
    message = termination_message([fail("redis", "ä" * MAX_MESSAGE_BYTES, "")])
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert message.startswith("redis: ää")


def test_a_file_for_the_message_that_cannot_be_looked_at_is_none(tmp_path: Path) -> None:
    assert write_termination_message(tmp_path / ("x" * 300), FINDINGS) == ""
