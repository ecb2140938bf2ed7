"""The parts of a local cluster: services, and the server behind the index."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.local.supervisor import PROBE_TIMEOUT_S
from shared.child_process import ChildProcess
from shared.process_events import Progress, Ready
from shared.rpc.server import channel

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
        environment: Mapping[str, str],
    ) -> None:
        """`environment` is added to the launcher's own at each start; `on_progress` is called during the first start
        alone. `start_timeout_s` as in ClusterSpec."""
        self.name = name
        self.log_path = log_path
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._environment = environment
        self.child = ChildProcess(name, command, log_path, environment=environment, on_progress=on_progress)
        """The process of the latest start."""
        self._grpc = ""
        self.endpoints: Mapping[str, str] = {}
        """Details of its service beside its address, as of its last start; see `shared.process.Service`."""

    async def start(self) -> None:
        """The first start; empties the log and returns at once."""
        await self.child.start()

    async def ready(self) -> Ready:
        """See `ChildProcess.ready`."""
        ready = await self.child.ready(self._start_timeout_s)
        self.endpoints = ready.endpoints
        self._grpc = ready.endpoints.get("grpc", ready.address)
        return ready

    async def restart(self) -> None:
        """See `Part`. A process that is not ready in time is killed."""
        self.child = ChildProcess(self.name, self._command, self.log_path, environment=self._environment, keep_log=True)
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

    async def answers(self) -> bool:
        """See `Part`. Any answer of gRPC's health service counts: a process that drains is alive."""
        try:
            async with channel(self._grpc) as opened:
                await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    def kill(self) -> None:
        """See `Part`."""
        self.child.kill()


class MemberPart(ServicePart):
    """The process that takes the place of a further host of a worker's group. Implements `Part`."""

    async def answers(self) -> bool:
        """See `Part`. It serves nothing: its leader notices when it is silent."""
        return True


class IndexPart:
    """The embedded Valkey; after a restart the holders publish its contents again. Implements `Part`."""

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

    async def answers(self) -> bool:
        """See `Part`."""
        return await self._server.answers(PROBE_TIMEOUT_S)

    def kill(self) -> None:
        """See `Part`."""
        if (pid := self._server.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
