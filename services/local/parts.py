"""What a local cluster is made of: services, and the server behind the index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.child_process import ChildProcess
from shared.process_events import Progress, Ready

if TYPE_CHECKING:
    from services.kvstore.embedded import EmbeddedValkey


class ServicePart:
    """A service: a child process with the event protocol. Implements `Part`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        start_timeout_s: float,
        on_progress: Callable[[str, Progress], None],
    ) -> None:
        """`on_progress` is called during the first start alone. `start_timeout_s` as in ClusterSpec."""
        self.name = name
        self.log_path = log_path
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self.child = ChildProcess(name, command, log_path, on_progress=on_progress)
        """The process of the latest start."""
        self.endpoints: Mapping[str, str] = {}
        """What it serves beside its address since it was last ready; see `shared.process.Service`."""

    async def start(self) -> None:
        """The first start; empties the log and returns at once."""
        await self.child.start()

    async def ready(self) -> Ready:
        """See `ChildProcess.ready`."""
        ready = await self.child.ready(self._start_timeout_s)
        self.endpoints = ready.endpoints
        return ready

    async def restart(self) -> None:
        """See `Part`. A process that is not ready in time is killed."""
        self.child = ChildProcess(self.name, self._command, self.log_path, keep_log=True)
        await self.child.start()
        try:
            await self.ready()
        except Exception:
            self.child.kill()
            await self.child.wait(None)
            raise

    async def ended(self) -> str:
        """See `Part`."""
        await self.child.wait(None)
        return self.child.exit_text()


class IndexPart:
    """The embedded Valkey; what it held is published again by its holders. Implements `Part`."""

    name = "valkey"

    def __init__(self, server: EmbeddedValkey) -> None:
        self.log_path = server.log_path
        self._server = server

    async def restart(self) -> None:
        """See `Part`."""
        await self._server.start()

    async def ended(self) -> str:
        """See `Part`."""
        return await self._server.ended()
