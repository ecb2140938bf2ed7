"""What a process of Tandem says and how it ends, with a service of three lines; each case a real process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, sys
from shared.errors import ModelLoadError
from shared.process import progress_event, run_service

class Service:
    address = "127.0.0.1:1"
    endpoints = {"http": "127.0.0.1:2"}
    async def close(self):
        progress_event(2.0, "closed")
        if sys.argv[1] == "hang":
            await asyncio.Event().wait()

async def start():
    progress_event(0.12345, "größer")
    if sys.argv[1] == "refuse":
        raise ModelLoadError("no such folder", field="model")
    if sys.argv[1] == "bug":
        raise KeyError("oops")
    if sys.argv[1] == "slow":
        await asyncio.Event().wait()
    return Service()

sys.exit(run_service(start))
"""
PROGRESS = {"event": "progress", "fraction": 0.123, "text": "größer"}
READY = {"event": "ready", "address": "127.0.0.1:1", "http": "127.0.0.1:2"}
CLOSED = {"event": "progress", "fraction": 1.0, "text": "closed"}


async def start(case: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, case, cwd=ROOT, stdout=PIPE, stderr=PIPE)


async def next_event(process: Process) -> Any:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return json.loads(await process.stdout.readline())


async def rest(process: Process) -> tuple[list[Any], str]:
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return [json.loads(line) for line in out.splitlines()], err.decode()


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
