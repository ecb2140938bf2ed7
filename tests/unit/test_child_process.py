"""A child's start is reported, its failures are typed, and its end is certain."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.child_process import ChildProcess
from shared.errors import DeadlineExceeded, Internal, ModelLoadError
from shared.process_events import Progress
from tests.unit.local.fakes import FakeCommands
from tests.unit.local.processes import wait_for_end
from tests.waiting import DEADLINE_S


@pytest.fixture
def commands(tmp_path: Path) -> FakeCommands:
    return FakeCommands(tmp_path / "journal")


@asynccontextmanager
async def started(
    commands: FakeCommands, behaviour: str, progress: list[tuple[str, Progress]] | None = None
) -> AsyncIterator[ChildProcess]:
    """A running fake; killed at the end."""
    seen = progress if progress is not None else []
    child = ChildProcess(
        "worker",
        commands.process("worker", behaviour),
        commands.journal.with_name("worker.log"),
        on_progress=lambda name, step: seen.append((name, step)),
    )
    await child.start()
    try:
        yield child
    finally:
        child.kill()
        await child.stop(20.0)


async def test_progress_comes_before_ready_and_sigterm_ends_it_with_status_0(commands: FakeCommands) -> None:
    progress: list[tuple[str, Progress]] = []
    async with started(commands, "serves", progress) as child:
        ready = await child.ready(60.0)
        assert ready.address == f"127.0.0.1:{child.pid}"
        assert progress == [("worker", Progress(0.5, "loading weights"))]
        await child.stop(20.0)
        assert child.returncode == 0
        assert commands.events() == ["worker start", "worker stop"]
        await child.stop(20.0)


async def test_the_error_that_a_child_reports_is_raised_as_its_class(commands: FakeCommands) -> None:
    async with started(commands, "refuses") as child:
        with pytest.raises(ModelLoadError, match="no model_type") as caught:
            await child.ready(60.0)
        assert caught.value.field == "model"
        assert caught.value.details["process"] == "worker"
        assert caught.value.details["log"] == str(child.log_path)


async def test_a_child_that_dies_without_a_word_shows_the_end_of_its_log(commands: FakeCommands) -> None:
    async with started(commands, "dies") as child:
        with pytest.raises(Internal, match="exit status 3") as caught:
            await child.ready(60.0)
        tail = str(caught.value.details["log_tail"]).splitlines()
        assert tail[-1] == "log line 19"
        assert len(tail) < 20


async def test_a_child_that_is_killed_while_it_loads_names_the_signal(commands: FakeCommands) -> None:
    async with started(commands, "never ready") as child:
        child.kill()
        with pytest.raises(Internal, match="SIGKILL"):
            await child.ready(60.0)


async def test_a_child_that_is_not_ready_in_time_is_an_error(commands: FakeCommands) -> None:
    async with started(commands, "never ready") as child:
        with pytest.raises(DeadlineExceeded, match=r"worker was not ready after 0\.2 s"):
            await child.ready(0.2)


async def test_what_a_library_prints_goes_to_the_log_and_does_not_disturb(commands: FakeCommands) -> None:
    async with started(commands, "noisy") as child:
        await child.ready(60.0)
        assert "a library says hello" in child.log_tail()


async def test_a_log_that_cannot_be_written_hides_neither_the_start_nor_the_end(commands: FakeCommands) -> None:
    async with started(commands, "noisy") as child:
        child.log_path.unlink()
        child.log_path.mkdir()
        await child.ready(60.0)
        await child.stop(20.0)
        assert (child.returncode, child.log_tail()) == (0, "")


async def test_a_child_that_ignores_sigterm_is_killed(commands: FakeCommands) -> None:
    async with started(commands, "stubborn") as child:
        await child.ready(60.0)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while commands.events()[-1] != "worker stop":
                await asyncio.sleep(0.01)
        await child.stop(0.3)
        assert child.returncode == -signal.SIGKILL
        assert child.exit_text() == "SIGKILL"


async def test_what_a_child_left_running_ends_with_it(commands: FakeCommands) -> None:
    async with started(commands, "leaves a child") as child:
        await child.ready(60.0)
        await child.stop(0.5)
        await child.wait(0.0)  # its stdout is at its end, so nobody holds it any more


async def test_a_terminals_ctrl_c_does_not_reach_it(commands: FakeCommands) -> None:
    async with started(commands, "serves") as child:
        await child.ready(60.0)
        assert os.getsid(child.pid) == child.pid != os.getsid(0)


def answering(commands: FakeCommands) -> ChildProcess:
    return ChildProcess(
        "worker",
        commands.process("worker", "answers"),
        commands.journal.with_name("worker.log"),
        environment={"GREETING": "hello"},
        takes_requests=True,
    )


async def test_a_request_is_answered_by_a_child_with_an_environment_of_its_own(commands: FakeCommands) -> None:
    child = answering(commands)
    async with child.serving() as ready:
        assert ready.address == f"127.0.0.1:{child.pid}"
        assert await child.ask(number=1) == ["hello", {"number": 1}]
        assert await child.ask(text="two") == ["hello", {"text": "two"}]
    assert child.returncode == 0


async def test_a_request_that_fails_raises_the_error_that_the_child_reports(commands: FakeCommands) -> None:
    child = answering(commands)
    async with child.serving():
        with pytest.raises(ModelLoadError, match="no such request"):
            await child.ask(kind="ModelLoadError")
        assert await child.ask(number=2) == ["hello", {"number": 2}]


async def test_a_request_to_a_child_that_ends_is_an_error_and_so_is_the_next_one(commands: FakeCommands) -> None:
    child = answering(commands)
    async with child.serving():
        for _ in range(2):
            with pytest.raises(Internal, match=r"ended before its answer \(exit status 7\)"):
                await child.ask(status=7)
        assert await child.wait(60.0) == 7


async def test_a_child_that_does_not_end_by_itself_is_an_error_of_waiting(commands: FakeCommands) -> None:
    async with started(commands, "serves") as child:
        await child.ready(60.0)
        with pytest.raises(DeadlineExceeded, match="had not ended"):
            await child.wait(0.1)


def test_it_does_not_outlive_a_killed_launcher(commands: FakeCommands, tmp_path: Path) -> None:
    launcher = f"""
import asyncio, pathlib
from shared.child_process import ChildProcess

async def main():
    child = ChildProcess("worker", {commands.process("worker")!r}, pathlib.Path({str(tmp_path / "log")!r}))
    await child.start()
    await child.ready(60.0)
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not wait_for_end(pid, timeout_s=0.0)
        process.kill()
    assert wait_for_end(pid)
