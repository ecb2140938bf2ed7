"""One child process that speaks the event protocol of shared/process.py: its start, its events, its log, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from shared.errors import DeadlineExceeded, Internal, TandemError
from shared.parent_death import command_dying_with_parent
from shared.process_events import Answer, Progress, Ready, parse_event

_MAX_LINE_BYTES = 16 * 1024 * 1024
_LOG_TAIL_LINES = 8
_KILLED_TIMEOUT_S = 5.0


class ChildProcess:
    """Runs one command. `start()` once, then `ready()` where it is a service, then `stop()`, `kill()` or `wait()`.

    The child is in a session of its own: a terminal's Ctrl-C reaches the launcher alone, which stops its children in
    order. It gets SIGKILL when the launcher dies, however that happens. Call everything on the event loop of the
    process's main thread (the kernel ties that SIGKILL to the thread that started the child).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        takes_requests: bool = False,
        keep_log: bool = False,
        on_progress: Callable[[str, Progress], None] | None = None,
    ) -> None:
        """`command[0]` is an absolute path; `environment` is added to the launcher's own.

        `takes_requests` opens the child's stdin for `ask`. `keep_log` appends to the log. `on_progress(name, progress)`
        is called for each progress event.
        """
        self.name = name
        self.log_path = log_path
        self.command = tuple(command)
        self.environment = dict(environment or {})
        self._takes_requests = takes_requests
        self._keep_log = keep_log
        self._on_progress = on_progress
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._answer: asyncio.Future[object] | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before `start()`."""
        return self._process.pid if self._process is not None else 0

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Starts the process and returns at once; its stderr goes to `log_path`, emptied unless `keep_log`."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if not self._keep_log:
            self.log_path.write_bytes(b"")
        self._ready = asyncio.get_running_loop().create_future()
        with self.log_path.open("ab") as log:
            self._process = await create_subprocess_exec(
                *command_dying_with_parent(list(self.command)),
                stdin=PIPE if self._takes_requests else DEVNULL,
                stdout=PIPE,
                stderr=log,
                env={**os.environ, **self.environment},
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        self._watch = asyncio.create_task(self._follow(self._process, self._ready))

    async def ready(self, timeout_s: float) -> Ready:
        """Waits for the ready event.

        Raises the error that the child reported, Internal with the end of its log where it ended without an event,
        DeadlineExceeded after `timeout_s` seconds. `details` hold the process's name and log file.
        """
        assert self._ready is not None, "start() first"
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.name} was not ready after {timeout_s:g} s", process=self.name, log=str(self.log_path)
            ) from error

    async def ask(self, **request: object) -> object:
        """Writes the request as one JSON line to the child's stdin; returns the value of its next answer event.

        One request at a time. Raises the error that the child reports instead, and Internal where it ends.
        """
        assert self._process is not None, "start() first"
        assert self._process.stdin is not None, "made without takes_requests"
        assert self._watch is not None
        assert self._answer is None or self._answer.done(), "one request at a time"
        if self._watch.done():
            raise self._ended_early("its answer")
        self._answer = asyncio.get_running_loop().create_future()
        with suppress(ConnectionError):  # it ended: `_follow` fails the answer
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        return await self._answer

    async def wait(self, timeout_s: float | None) -> int:
        """Waits until the process ends by itself; its exit status. Raises DeadlineExceeded after `timeout_s` seconds
        (None: never)."""
        if not await self._ended(timeout_s):
            raise DeadlineExceeded(f"{self.name} had not ended after {timeout_s:g} s", process=self.name)
        return self.returncode or 0

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after `timeout_s` seconds; returns when the process has ended. Idempotent."""
        self.send_signal(signal.SIGTERM)
        if not await self._ended(timeout_s):
            self.kill()
            await self._ended(_KILLED_TIMEOUT_S)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone, where it still runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL now, to the process and what it started; `stop()` still has to be awaited for the end."""
        if self._watch is not None and not self._watch.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    @asynccontextmanager
    async def serving(self, start_timeout_s: float = 60.0, stop_timeout_s: float = 60.0) -> AsyncIterator[Ready]:
        """Starts the process, waits until it is ready, and stops it at the end of the block. Raises as `ready`."""
        try:
            await self.start()
            yield await self.ready(start_timeout_s)
        except BaseException:
            self.kill()
            raise
        finally:
            await self.stop(stop_timeout_s)

    def log_tail(self) -> str:
        """The last lines of the log; empty where it has none."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def exit_text(self) -> str:
        """How the process ended: "exit status 1" or "SIGKILL"."""
        status = self.returncode or 0
        if status >= 0:
            return f"exit status {status}"
        with suppress(ValueError):
            return signal.Signals(-status).name
        return f"signal {-status}"

    async def _ended(self, timeout_s: float | None) -> bool:
        """Waits until the process is gone and its stdout was read to the end; False when `timeout_s` passed first."""
        if self._watch is None:
            return True
        done, _ = await asyncio.wait({self._watch}, timeout=timeout_s)
        return bool(done)

    async def _follow(self, process: Process, ready: asyncio.Future[Ready]) -> None:
        """Reads stdout to its end, then reports the exit."""
        assert process.stdout is not None
        while line := await _read_line(process.stdout):
            match parse_event(line):
                case None:
                    with suppress(OSError), self.log_path.open("ab") as log:  # this task's end is the process's
                        log.write(line)
                case Progress() as progress:
                    if self._on_progress is not None:
                        self._on_progress(self.name, progress)
                case Ready() as event:
                    if not ready.done():
                        ready.set_result(event)
                case Answer(value):
                    if self._answer is not None and not self._answer.done():
                        self._answer.set_result(value)
                case TandemError() as error:
                    error.details.update(process=self.name, log=str(self.log_path))
                    _fail(self._answer if ready.done() else ready, error)
        await process.wait()
        _fail(ready, self._ended_early("it was ready"))
        _fail(self._answer, self._ended_early("its answer"))

    def _ended_early(self, before: str) -> Internal:
        return Internal(
            f"{self.name} ended before {before} ({self.exit_text()})",
            process=self.name,
            log=str(self.log_path),
            log_tail=self.log_tail(),
        )


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, b"" at the end; a line over the limit reads as an empty one."""
    try:
        return await stream.readline()
    except ValueError:
        return b"\n"


def _fail(future: asyncio.Future[Any] | None, error: TandemError) -> None:
    """Nothing where the future is done already."""
    if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # marks it as seen: the launcher may have given up on another child's error already
