"""The processes that the index benchmark measures: Valkey and the KV store, as a deployment starts them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from types import TracebackType

START_TIMEOUT_S = 60.0


class ServiceProcess:
    """`python -m MODULE …`: entered, it serves; left, it has drained."""

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._command = (sys.executable, "-m", module, *arguments)
        self._environment = environment
        self._process: Process | None = None
        self.address = ""
        """What the process's ready event names."""

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> ServiceProcess:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env={**os.environ, **self._environment}, stdout=PIPE
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                event = json.loads(await self._process.stdout.readline())
            if event["event"] != "ready":
                raise RuntimeError(f"{' '.join(self._command)} did not start: {event['message']}")
        except BaseException:
            await self._stop()
            raise
        self.address = event["address"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()
