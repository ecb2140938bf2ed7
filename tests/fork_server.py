"""Services of a cluster under test as forks of one process that has imported them: torch, gRPC and the rest take longer
than all else that a worker does before its first request.

What runs in a fork is what `python -m services.decode …` runs, with its own arguments, environment, streams and
session; only the import is shared, and the names of the process in /proc are the server's. `tests/integration/local`
and the tests of each service by itself start them as users do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from unittest.mock import patch

from shared import child_process
from shared.openmp import wait_briefly
from shared.parent_death import command_dying_with_parent, die_with_parent

MODULES = (
    "services.prefill.role", "services.decode.role", "services.worker.service", "services.router.service",
    "services.router.settings", "services.kvstore.server", "services.kvstore.settings",
)  # fmt: skip
"""Imported once. They start no thread and read nothing of the environment that one of their processes may change."""
ROOT = Path(__file__).parents[1]
RUN_BY_FORK = ("services.", "tests.")
NUM_WRAPPING = len(command_dying_with_parent([]))
MAX_REQUEST_BYTES = 1 << 18


class Fork:
    """Has what `ChildProcess` uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter | None, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self.waiting: asyncio.Task[int]

    async def follow(self, news: asyncio.StreamReader) -> int:
        """Waits for the server's word on how the process ended."""
        # Without a word the server has died, and its forks with it.
        self.returncode = int(await news.readline() or -signal.SIGKILL)
        return self.returncode

    async def wait(self) -> int:
        """Exit status, negative for a signal."""
        return await asyncio.shield(self.waiting)

    def send_signal(self, number: signal.Signals) -> None:
        """Raises ProcessLookupError where the process has ended."""
        os.kill(self.pid, number)


class ForkServer:
    """The client's side; the process starts with the first request."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Within, a `ChildProcess` that runs a module of a service is a fork."""
        real = child_process.create_subprocess_exec

        async def start(*command: str, **options):
            own = command[NUM_WRAPPING:]
            if own[:2] == (sys.executable, "-m") and own[2].startswith(RUN_BY_FORK):
                return await self._fork(own[2:], **options)
            return await real(*command, **options)

        with patch.object(child_process, "create_subprocess_exec", start):
            yield

    async def _fork(
        self, argv: tuple[str, ...], stdin: int, stderr, env: Mapping[str, str], limit: int, **_: object
    ) -> Fork:
        (out, out_end), (news, news_end) = os.pipe(), os.pipe()
        in_end, into = os.pipe() if stdin == PIPE else (os.open(os.devnull, os.O_RDONLY), -1)
        request = json.dumps({"argv": argv, "env": dict(env), "cwd": os.getcwd()}).encode()
        given = [in_end, out_end, stderr.fileno(), news_end]
        try:
            socket.send_fds(self._server(), [request], given)
        finally:
            for end in (in_end, out_end, news_end):
                os.close(end)
        told = await _reader(news)
        fork = Fork(int(await told.readline()), await _writer(into) if into >= 0 else None, await _reader(out, limit))
        fork.waiting = asyncio.create_task(fork.follow(told))
        return fork

    def _server(self) -> socket.socket:
        if self._connection is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
            with theirs:
                process = subprocess.Popen(command_dying_with_parent(command), pass_fds=[theirs.fileno()], cwd=ROOT)
            self._connection = ours
            atexit.register(_end, process, ours)
        return self._connection


def _end(server: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    server.wait()


async def _reader(descriptor: int, limit: int = 1 << 16) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    return reader


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(descriptor, "wb", 0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


forked_services = ForkServer().used


def serve(connection: socket.socket) -> None:
    """Forks what is asked for, and says how each fork ended, until the other side is gone."""
    waiting = selectors.DefaultSelector()
    waiting.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not connection:
                waiting.unregister(key.fileobj)
                _report(key.fd, *key.data)
                continue
            request, descriptors, *_ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 4)
            if not request:
                return
            pid = os.fork()
            if not pid:
                _become(json.loads(request), descriptors)
            *streams, news = descriptors
            for each in streams:
                os.close(each)
            with contextlib.suppress(BrokenPipeError):  # who asked is gone
                os.write(news, b"%d\n" % pid)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, news))


def _report(pidfd: int, pid: int, news: int) -> None:
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(news, b"%d\n" % os.waitstatus_to_exitcode(status))
    os.close(news)


def _become(request: Mapping, descriptors: list[int]) -> None:
    """The module's process, from here to its end."""
    parent, status = os.getppid(), 1
    try:
        os.setsid()
        die_with_parent(parent)
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        os.closerange(3, max(descriptors) + 1)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = list(request["argv"])
        status = _exit_status(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))
        # As the interpreter ends: a thread that never does, or a fault at the end, shows.
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_status(run: Callable[[], object]) -> int:
    """As the interpreter's."""
    try:
        run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    wait_briefly()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
