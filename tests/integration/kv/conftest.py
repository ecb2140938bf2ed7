"""Two sides of a transfer plane: near in the test's process, far in it too (local) or in another one (UCX)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from shared.errors import TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.transfer import KVTransfer
from shared.kv.ucx import UcxTransfer
from tests.integration.kv.far_side import FarSide
from tests.local_transfer import LocalPlane, LocalTransfer
from tests.waiting import DEADLINE_S

NEAR_HOST = b"near host: 16 B."
FAR_HOST = b"far host:  16 B."
SILENT_S = 3.0
"""A far process that is killed or stopped is waited for this long."""

BY_NETWORK = {"UCX_TLS": "^cma"}
"""Environment of a process that says it is on another host: nobody reads its memory."""

GONE = re.compile(
    rb"sock\.c:\d+ +UCX +ERROR +connect\(.*\) failed: Connection refused"
    rb"|tcp_cm\.c:\d+ +UCX +ERROR +tcp_ep .* connection establishment for socket fd \d+ was unsuccessful"
)
"""What UCX rightly says where a test ends, and its side with it, while the far side still connects to it."""

Call = Callable[..., Any]
"""`await far("send", ticket=…)` runs a command of `FarSide`."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on both event loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the six pairs of loop and implementation, four see everything that the two loops can differ in."""
    spared = [item for item in items if item.name.endswith(("[uvloop-local]", "[asyncio-tcp]"))]
    spared += [item for item in items if "[uvloop-local-" in item.name or "[asyncio-tcp-" in item.name]
    items[:] = [item for item in items if item not in spared]
    config.hook.pytest_deselected(items=spared)


class FarProcess:
    """A process that runs `far_side`; tests connect to it one after the other."""

    def __init__(
        self,
        host_id: bytes | None,
        fleet_key: bytes = b"",
        environment: Mapping[str, str] | None = None,
        encryption: str = "none",
    ) -> None:
        arguments = [(host_id or b"").decode(), fleet_key.decode(), encryption]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.kv.far_side", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
        )
        self.pid = self._process.pid
        self._numbers = itertools.count()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Call]:
        """Commands for it."""
        loop = asyncio.get_running_loop()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answers, commands = self._process.stdout.fileno(), self._process.stdin
        os.set_blocking(answers, False)
        waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        begun = bytearray()

        def read() -> None:
            # Not connect_read_pipe: uvloop closes its pipe's descriptor twice, the second time maybe another's.
            if not (piece := os.read(answers, 1 << 16)):
                loop.remove_reader(answers)
            begun.extend(piece)
            *lines, rest = begun.split(b"\n")
            begun[:] = rest
            for answer in map(json.loads, lines):
                asked = waiting.pop(answer["number"], None)
                if asked is not None and not asked.done():  # else by a test that did not wait for it
                    asked.set_result(answer)

        async def call(op: str, **arguments: Any) -> Any:
            number = next(self._numbers)
            waiting[number] = loop.create_future()
            commands.write(json.dumps({"number": number, "op": op, **arguments}).encode() + b"\n")
            commands.flush()
            answer = await waiting[number]
            if "failed" in answer:
                raise TransferFailed(answer["failed"])
            return answer["result"]

        loop.add_reader(answers, read)
        try:
            yield call
        finally:
            loop.remove_reader(answers)

    def stop(self) -> None:
        """Returns when all its threads have stopped; all it can do from then on is to be killed."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def end(self, *, killed: bool, quiet: bool = True) -> None:
        """Waits for its end, or kills it; `quiet`: UCX must not have complained."""
        if killed:
            self._process.kill()
        try:
            _, complaints = self._process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        found = [line for line in complaints.splitlines() if quiet and not GONE.search(line)]
        assert killed or (self._process.returncode, found) == (0, [])


class Sides:
    """What a test gets."""

    def __init__(
        self,
        near: KVTransfer,
        far: Call,
        address: bytes,
        process: FarProcess | None,
        key: FleetKey | None = None,
    ) -> None:
        self.near = near
        self.far = far
        self.address = address
        """Of the far side."""
        self.process = process
        self.key = key
        """Of the near side."""


@asynccontextmanager
async def ucx_sides(
    process: FarProcess, key: FleetKey | None = None, *, ends: bool = False, **near_options: Any
) -> AsyncIterator[Sides]:
    """A near side beside that process, which `ends` with it."""
    near = UcxTransfer(fleet_key=key, **near_options)
    try:
        await near.start()
        try:
            async with process.connected() as far:
                yield Sides(near, far, bytes.fromhex(await far("address")), process, key)
                if not ends:  # a process that connects to a plane that is closed would wake all the time (0102)
                    await far("drop_peer", address=near.address.hex())
        finally:
            await near.close()
    finally:
        if ends:
            process.end(killed=True)


@pytest.fixture(scope="session")
def ucx_process() -> Iterator[FarProcess]:
    """On this host."""
    process = FarProcess(None)
    yield process
    process.end(killed=False)


@pytest.fixture(scope="session")
def tcp_process() -> Iterator[FarProcess]:
    """A process that claims to be on another host."""
    process = FarProcess(FAR_HOST, environment=BY_NETWORK)
    yield process
    process.end(killed=False)


@pytest.fixture(params=["local", "ucx", "tcp"])
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    """Both sides of every implementation; the far process serves many tests."""
    if request.param == "local":
        plane = LocalPlane()
        near, far = LocalTransfer(plane), LocalTransfer(plane)
        await near.start()
        await far.start()
        side = FarSide(far)

        async def call(op: str, **arguments: Any) -> Any:
            return await side.handle({"op": op, **arguments})

        yield Sides(near, call, far.address, None)
        await near.close()
        await far.close()
    else:
        process = request.getfixturevalue(f"{request.param}_process")
        near_host = NEAR_HOST if request.param == "tcp" else None
        async with ucx_sides(process, host_id=near_host, cancel_timeout_s=DEADLINE_S) as sides:
            yield sides


@pytest.fixture(params=["ucx", "tcp"])
async def doomed(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    """UCX sides whose far process is there to be killed."""
    tcp = request.param == "tcp"
    process = FarProcess(FAR_HOST, environment=BY_NETWORK) if tcp else FarProcess(None)
    near_host = NEAR_HOST if tcp else None
    async with ucx_sides(process, ends=True, host_id=near_host, cancel_timeout_s=SILENT_S) as sides:
        yield sides
