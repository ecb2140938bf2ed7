"""One child process of a local cluster: its start, its events, its log, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from services.local.events import Progress, Ready, parse_event
from shared.errors import DeadlineExceeded, Internal, TandemError
from shared.parent_death import command_dying_with_parent

_MAX_LINE_BYTES = 1024 * 1024
_LOG_TAIL_LINES = 8
_KILLED_TIMEOUT_S = 5.0


class Child:
    """Runs one command that speaks the event protocol. `start()` once, then `ready()`, then `stop()` or `kill()`.

    The child is in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone, which stops the
    cluster in order; and it gets SIGKILL when the launcher dies, however that happens. Call everything on the
    event loop of the process's main thread (the kernel ties that SIGKILL to the thread that started the child).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        on_progress: Callable[[str, Progress], None],
        on_exit: Callable[[Child], None],
    ) -> None:
        """`on_progress(name, progress)` for each progress event; `on_exit(self)` once the process has ended."""
        self.name = name
        self.log_path = log_path
        self._command = tuple(command)
        self._on_progress = on_progress
        self._on_exit = on_exit
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before `start()`."""
        return self._process.pid if self._process is not None else 0

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Starts the process and returns at once; its stderr goes to `log_path`, which is emptied first."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        self._ready = asyncio.get_running_loop().create_future()
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command_dying_with_parent(list(self._command), signal.SIGKILL),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        self._watch = asyncio.create_task(self._follow(self._process, self._ready))

    async def ready(self, timeout_s: float) -> Ready:
        """Waits for the ready event.

        Raises the error that the child reported, Internal with the end of its log where it died without a word,
        DeadlineExceeded after `timeout_s` seconds. `details` hold the process's name and log file.
        """
        assert self._ready is not None, "start() first"
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.name} was not ready after {timeout_s:g} s", process=self.name, log=str(self.log_path)
            ) from error

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after `timeout_s` seconds; returns when the process has ended. Idempotent."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
        if not await self._ended(timeout_s):
            self.kill()
            await self._ended(_KILLED_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL now, to the process and what it started; `stop()` still has to be awaited for the end."""
        if self._watch is not None and not self._watch.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines of the log; empty where it has none."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def end_in_words(self) -> str:
        """How the process ended: "exit status 1" or "SIGKILL"."""
        status = self.returncode or 0
        if status >= 0:
            return f"exit status {status}"
        with suppress(ValueError):
            return signal.Signals(-status).name
        return f"signal {-status}"

    async def _ended(self, timeout_s: float) -> bool:
        """Waits until the process is gone and all it said was read; False when `timeout_s` passed first."""
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
                    with self.log_path.open("ab") as log:
                        log.write(line)
                case Progress() as progress:
                    self._on_progress(self.name, progress)
                case Ready() as event:
                    if not ready.done():
                        ready.set_result(event)
                case TandemError() as error:
                    if not ready.done():
                        error.details.update(process=self.name, log=str(self.log_path))
                        _fail(ready, error)
        await process.wait()
        if not ready.done():
            _fail(
                ready,
                Internal(
                    f"{self.name} ended before it was ready ({self.end_in_words()})",
                    process=self.name,
                    log=str(self.log_path),
                    log_tail=self.log_tail(),
                ),
            )
        self._on_exit(self)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, b"" at the end; a line over the limit reads as an empty one."""
    try:
        return await stream.readline()
    except ValueError:
        return b"\n"


def _fail(ready: asyncio.Future[Ready], error: TandemError) -> None:
    ready.set_exception(error)
    ready.exception()  # marks it as seen: the launcher may have given up on another child's error already
