"""Scripted servers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.loadtest.fake_script import Behaviour, Script, Truth
from tests.waiting import DEADLINE_S

REPOSITORY = Path(__file__).parents[3]


class FakeHost:
    """The process; it holds any number of servers. It takes a second to start, a server takes none."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.loadtest.fake_server"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, order: dict[str, Any]) -> Any:
        """An order's answer; see fake_server."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        """Ends the process, if it did not by its script."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()


class FakeServer:
    """Running until `finish`, which returns what it really did."""

    def __init__(self, script: Script, host: FakeHost) -> None:
        self._host = host
        self._ports = host.ask(asdict(script))
        self._truth: dict[str, Truth] | None = None
        self.http = f"http://127.0.0.1:{self._ports['http']}"
        self.grpc = f"grpc://127.0.0.1:{self._ports['grpc']}"

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._host.process.pid

    def target(self, protocol: str) -> str:
        """Its address for `http` or `grpc`."""
        return self.http if protocol == "http" else self.grpc

    def finish(self) -> dict[str, Truth]:
        """Ends the server; its log by request id, warm-up included. Idempotent."""
        if self._truth is None:
            rows = [Truth(**row) for row in self._host.ask({"finish": self._ports["http"]})]
            self._truth = {row.request_id: row for row in rows}
        return self._truth


StartFake = Callable[..., FakeServer]


@pytest.fixture(scope="session")
def fake_host() -> Iterator[FakeHost]:
    """The process that all tests share whose script lets it live."""
    host = FakeHost()
    yield host
    host.stop()


@pytest.fixture
def start_fake(fake_host: FakeHost) -> Iterator[StartFake]:
    """Starts servers: `start_fake(behaviour, …, token_ids=…, service_ms=…)`."""
    with ExitStack() as stack:

        def start(*behaviours: Behaviour, **settings: float) -> FakeServer:
            script = Script(behaviours or (Behaviour(),), **settings)  # type: ignore[arg-type]
            if script.deadly:
                own = FakeHost()
                stack.callback(own.stop)
                return FakeServer(script, own)
            server = FakeServer(script, fake_host)
            stack.callback(server.finish)
            return server

        yield start
