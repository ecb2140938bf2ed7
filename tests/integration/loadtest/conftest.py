"""A scripted server as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.loadtest.fake_script import Behaviour, Script, Truth, read_truth

REPOSITORY = Path(__file__).parents[3]


class FakeServer:
    """Running until `finish`, which returns what it really did."""

    def __init__(self, script: Script, folder: Path) -> None:
        self._log = folder / "truth.jsonl"
        (folder / "script.json").write_text(script.dump())
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integration.loadtest.fake_server"),
                *(str(folder / "script.json"), str(self._log)),
            ],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.http = f"http://127.0.0.1:{ports['http']}"
        self.grpc = f"grpc://127.0.0.1:{ports['grpc']}"

    def target(self, protocol: str) -> str:
        """Its address for `http` or `grpc`."""
        return self.http if protocol == "http" else self.grpc

    def finish(self) -> dict[str, Truth]:
        """Ends the server; its log by request id."""
        self.stop()
        return read_truth(self._log)

    def stop(self) -> None:
        """Ends the server. Idempotent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()


StartFake = Callable[..., FakeServer]


@pytest.fixture
def start_fake(tmp_path: Path) -> Iterator[StartFake]:
    """Starts servers: `start_fake(behaviour, …, token_ids=…, service_ms=…)`."""
    with ExitStack() as stack:

        def start(*behaviours: Behaviour, **script: float) -> FakeServer:
            folder = tmp_path / f"server-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            server = FakeServer(Script(behaviours or (Behaviour(),), **script), folder)  # type: ignore[arg-type]
            stack.callback(server.stop)
            return server

        yield start
