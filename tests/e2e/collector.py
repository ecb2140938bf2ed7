"""An OpenTelemetry collector beside a test: `otlp_receiver.py`, a process of its own, and what it got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import DEADLINE_S, until


@dataclass(frozen=True)
class Found:
    """One exported span."""

    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str
    began: float
    ended: float
    kind: int
    attributes: dict[str, Any]
    events: list[tuple[str, float]]
    links: list[str]
    error: str | None
    headers: dict[str, str]

    @property
    def took(self) -> float:
        return self.ended - self.began


class Collector:
    """The test's side of the process."""

    def __init__(self, grpc_port: int, http_port: int, path: Path) -> None:
        self.grpc = f"http://127.0.0.1:{grpc_port}"
        self.http = f"http://127.0.0.1:{http_port}/v1/traces"
        self._path = path

    def spans(self) -> list[Found]:
        text = self._path.read_text() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be still being written
        return [Found(**json.loads(line)) for line in whole.splitlines()]

    def of(self, trace: str) -> list[Found]:
        return [span for span in self.spans() if span.trace == trace]

    async def until(self, condition: Callable[[list[Found]], bool]) -> list[Found]:
        """All spans, once the condition holds of them."""
        await until(lambda: condition(self.spans()))
        return self.spans()


@contextlib.asynccontextmanager
async def collecting(folder: Path) -> AsyncIterator[Collector]:
    path = folder / "spans.jsonl"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.otlp_receiver", str(path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            ports = (await process.stdout.readline()).split()
        yield Collector(int(ports[0]), int(ports[1]), path)
    finally:
        process.kill()
        await process.wait()
