"""`tandem serve` from start to Ctrl-C, with real processes in the services' places."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from shared.errors import ModelLoadError, WorkerLost
from tandem_cli.foreground import Foreground
from tests.unit.local.fakes import FakeCommands, fake_spec
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]


class Screen(io.StringIO):
    """What was printed; wakes the caller that waits for a text."""

    def __init__(self) -> None:
        super().__init__()
        self._printed = asyncio.Event()

    def write(self, text: str) -> int:
        self._printed.set()
        return super().write(text)

    async def shows(self, text: str) -> None:
        """Returns once `text` was printed; a deadline is the test's."""
        while text not in self.getvalue():
            self._printed.clear()
            await self._printed.wait()


@pytest.fixture
def commands(tmp_path: Path) -> FakeCommands:
    return FakeCommands(tmp_path / "journal")


@pytest.fixture
def spec(tmp_path: Path) -> ClusterSpec:
    return fake_spec(tmp_path).replace(served_model_name="tiny")


@contextmanager
def running(spec: ClusterSpec, commands: FakeCommands) -> Iterator[tuple[Screen, asyncio.Task[int]]]:
    """The command without an example, on a screen that is no terminal."""
    screen = Screen()
    foreground = Foreground(spec, Console(file=screen, width=200), example=False, commands=commands)
    yield screen, asyncio.create_task(foreground.run())


async def test_ctrl_c_stops_everything_in_order_and_exits_0(spec: ClusterSpec, commands: FakeCommands) -> None:
    with running(spec, commands) as (screen, command):
        await screen.shows("Serving.")
        os.kill(os.getpid(), signal.SIGINT)
        assert await command == 0
    printed = screen.getvalue()
    assert "decode-0: loading weights" in printed
    assert "Tandem serves tiny after" in printed
    assert "gRPC        127.0.0.1:2" in printed
    assert printed.endswith("stopped\n")
    assert commands.events()[-4] == "router stop"
    assert commands.events()[-1] == "kvstore stop"
    assert not commands.index_is_there()


async def test_a_second_ctrl_c_hurries_the_router_and_a_third_kills(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["router"] = "stubborn router"
    with running(spec, commands) as (screen, command):
        await screen.shows("Serving.")
        os.kill(os.getpid(), signal.SIGINT)
        await screen.shows("once more ends them now")
        os.kill(os.getpid(), signal.SIGINT)
        await screen.shows("once more kills")
        while commands.events().count("router stop") < 2:
            await asyncio.sleep(0.01)
        assert "kvstore stop" not in commands.events()
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(command, DEADLINE_S) == 130


@pytest.mark.slow
async def test_a_second_cluster_in_one_folder_keeps_its_own_logs(spec: ClusterSpec, commands: FakeCommands) -> None:
    async with LocalCluster(spec, commands=commands) as first, LocalCluster(spec, commands=commands) as second:
        assert first.spec.log_dir == spec.log_dir
        assert second.spec.log_dir == spec.state_dir / "2" / "logs"
        assert (first.spec.log_dir / "supervisor.log").read_text().count("started, process") == 4
    third = LocalCluster(spec, commands=commands)
    async with third:
        assert third.spec.log_dir == spec.log_dir


async def test_ctrl_c_while_weights_load_exits_130(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["decode-0"] = "never ready"
    with running(spec, commands) as (screen, command):
        await screen.shows("prefill-0: ready")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await command == 130


async def test_a_worker_that_dies_is_told_and_the_rest_goes_on(
    spec: ClusterSpec, commands: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(spec, commands) as (screen, command):
        await screen.shows("Serving.")
        os.kill(commands.pid("decode-0"), signal.SIGKILL)
        err = ""
        while "decode-0 ended (SIGKILL)" not in err:
            await asyncio.sleep(0.01)
            err += capsys.readouterr().err
        assert not command.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await command == 0


async def test_a_restart_is_shown(spec: ClusterSpec, commands: FakeCommands) -> None:
    with running(spec.replace(restart=True), commands) as (screen, command):
        await screen.shows("Serving.")
        os.kill(commands.pid("prefill-0"), signal.SIGKILL)
        await screen.shows("prefill-0 is back after")
        os.kill(os.getpid(), signal.SIGINT)
        assert await command == 0
    logged = (spec.log_dir / "supervisor.log").read_text()
    for line in ("prefill-0 started, process", "prefill-0 ended (SIGKILL): starting again", "prefill-0 is back after"):
        assert line in logged


async def test_the_command_goes_on_while_one_router_is_left(spec: ClusterSpec, commands: FakeCommands) -> None:
    with running(spec.replace(num_routers=2), commands) as (screen, command):
        await screen.shows("Serving.")
        os.kill(commands.pid("router"), signal.SIGKILL)
        os.kill(commands.pid("router-1"), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="not started again"):
            await asyncio.wait_for(command, DEADLINE_S)


async def test_without_its_router_the_cluster_is_stopped(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["router"] = "router that dies"
    with running(spec, commands) as (_, command), pytest.raises(WorkerLost, match=r"router ended \(exit status 4\)"):
        await command
    assert commands.events()[-1] == "kvstore stop"


async def test_a_start_that_fails_says_nothing_of_stopping(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["prefill-0"] = "refuses"
    with running(spec, commands) as (screen, command), pytest.raises(ModelLoadError):
        await command
    assert "stopped" not in screen.getvalue()


def test_ctrl_c_while_the_command_is_still_imported_ends_it_without_a_traceback() -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "shared.errors":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from importlib.metadata import EntryPoint
EntryPoint("tandem", sys.argv[1], "console_scripts").load()()
"""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["tandem"]
    ended = subprocess.run([sys.executable, "-c", program, entry], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
