"""A service's process: its start, its end, and the events that it prints."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, Internal
from shared.process_events import Answer, Progress, Ready, parse_event
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, logging, sys
from shared.config import ServiceSettings
from shared.errors import ModelLoadError
from shared.process import progress_event, run_service

class Settings(ServiceSettings):
    case: str

class Service:
    address = "127.0.0.1:1"
    endpoints = {"http": "127.0.0.1:2"}
    def __init__(self, case):
        self.case = case
    async def close(self):
        progress_event(2.0, "closed")
        if self.case == "hang":
            await asyncio.Event().wait()

class HurriedService(Service):
    hurried = asyncio.Event()
    async def close(self):
        await super().close()
        await self.hurried.wait()
        progress_event(1.0, "hurried")
    def hurry(self):
        self.hurried.set()

async def start(settings):
    progress_event(0.12345, "größer")
    logging.getLogger("chatty").debug("starts")
    if settings.case == "refuse":
        raise ModelLoadError("no such folder", field="model")
    if settings.case == "bug":
        raise KeyError("oops")
    if settings.case == "slow":
        await asyncio.Event().wait()
    return HurriedService("wait") if settings.case == "hurry" else Service(settings.case)

sys.exit(run_service("tandem-test", Settings, start))
"""
PROGRESS = {"event": "progress", "fraction": 0.123, "text": "größer"}
READY = {"event": "ready", "address": "127.0.0.1:1", "http": "127.0.0.1:2"}
CLOSED = {"event": "progress", "fraction": 1.0, "text": "closed"}


async def start(case: str, *flags: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "--case", case, *flags, cwd=ROOT, stdout=PIPE, stderr=PIPE
    )


async def next_event(process: Process) -> Any:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return json.loads(await process.stdout.readline())


async def rest(process: Process) -> tuple[list[Any], str]:
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    return [json.loads(line) for line in out.splitlines()], err.decode()


async def test_a_second_signal_cuts_a_drain_short_where_the_service_can() -> None:
    process = await start("hurry")
    assert [await next_event(process), await next_event(process)] == [PROGRESS, READY]
    process.send_signal(signal.SIGTERM)
    assert await next_event(process) == CLOSED
    process.send_signal(signal.SIGTERM)
    assert (await rest(process))[0] == [{"event": "progress", "fraction": 1.0, "text": "hurried"}]
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_with_0(number: signal.Signals) -> None:
    process = await start("serve")
    assert [await next_event(process), await next_event(process)] == [PROGRESS, READY]
    process.send_signal(number)
    assert (await rest(process))[0] == [CLOSED]
    assert process.returncode == 0


async def test_a_second_signal_does_not_wait_for_the_drain() -> None:
    process = await start("hang")
    await next_event(process)
    await next_event(process)
    process.send_signal(signal.SIGTERM)
    assert await next_event(process) == CLOSED
    process.send_signal(signal.SIGTERM)
    await rest(process)
    assert process.returncode == -signal.SIGTERM


async def test_a_signal_during_the_start_ends_it() -> None:
    process = await start("slow")
    assert await next_event(process) == PROGRESS
    process.send_signal(signal.SIGTERM)
    events, err = await rest(process)
    assert (events, process.returncode) == ([], 0)
    assert "Traceback" not in err


async def test_a_refused_start_says_why_and_exits_with_2() -> None:
    process = await start("refuse")
    events, err = await rest(process)
    error = {"event": "error", "kind": "ModelLoadError", "message": "no such folder", "field": "model"}
    assert (events, process.returncode) == ([PROGRESS, error], 2)
    assert "Traceback" not in err


async def test_a_bug_is_told_too_and_exits_with_1() -> None:
    process = await start("bug")
    events, err = await rest(process)
    assert process.returncode == 1
    assert (events[1]["kind"], events[1]["field"]) == ("Internal", None)
    assert "Traceback" in err


async def test_the_log_is_json_from_the_settings_on() -> None:
    process = await start("bug", "--log-format", "json", "--log-level", "debug")
    _, err = await rest(process)
    records = [json.loads(line) for line in err.splitlines()]
    assert {record["service"] for record in records} == {"tandem-test"}
    (first,) = (record for record in records if record["logger"] == "chatty")
    assert (first["level"], first["message"]) == ("debug", "starts")
    assert records[-1]["level"] == "error"
    assert "KeyError: 'oops'" in records[-1]["exception"]


async def test_bad_settings_are_logged_as_text_and_told() -> None:
    process = await start("serve", "--log-format", "xml")
    events, err = await rest(process)
    assert [(event["kind"], event["field"]) for event in events] == [("ConfigError", "log_format")]
    assert process.returncode == 2
    assert "ERROR shared.process: cannot start: setting log_format" in err


def test_each_event_is_read() -> None:
    assert parse_event(b'{"event":"progress","fraction":0.4,"text":"loading"}\n') == Progress(0.4, "loading")
    assert parse_event(b'{"event":"ready","address":"h:1"}') == Ready("h:1")
    ready = parse_event(b'{"event":"ready","address":"h:1","http":"h:2","grpc":"h:3"}')
    assert ready == Ready("h:1", {"http": "h:2", "grpc": "h:3"})
    assert parse_event(b'{"event":"answer","value":[1.5]}') == Answer([1.5])


def test_an_error_comes_back_as_its_class_with_its_field() -> None:
    error = parse_event(b'{"event":"error","kind":"ConfigError","message":"no","field":"bind"}')
    assert isinstance(error, ConfigError)
    assert (error.message, error.field) == ("no", "bind")


def test_an_error_of_an_unknown_kind_is_internal() -> None:
    error = parse_event(b'{"event":"error","kind":"Surprise","message":"?","field":null}')
    assert isinstance(error, Internal)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        b"\xff\xfe",
        b"[1]",
        b"3",
        b'{"event":"ready"}',
        b'{"event":"answer"}',
        b'{"event":"progress","text":"x"}',
    ],
)
def test_what_is_no_event_is_none(line: bytes) -> None:
    assert parse_event(line) is None


@given(fraction=st.floats(allow_nan=False, allow_infinity=False))
def test_a_fraction_stays_within_its_bounds(fraction: float) -> None:
    event = parse_event(json.dumps({"event": "progress", "fraction": fraction, "text": ""}).encode())
    assert isinstance(event, Progress)
    assert 0.0 <= event.fraction <= 1.0
