"""Starts, watches and stops a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from services.local.addresses import check_free, reserved_address
from services.local.commands import ServiceCommands, TandemCommands, WorkerPlan, plan_workers, store_name
from services.local.cores import share_cores
from services.local.readiness import wait_until_serving
from services.local.spec import ClusterSpec
from shared.child_process import ChildProcess
from shared.errors import ModelLoadError
from shared.identity import WorkerRole
from shared.process_events import Progress, Ready

if TYPE_CHECKING:
    from services.kvstore.embedded import EmbeddedValkey

ProgressCallback = Callable[[str, Progress], None]

_GIVE_UP_TIMEOUT_S = 2.0
"""How long a process may take to end when the start failed, seconds: it has no requests to drain."""


class LocalCluster:
    """Index (Valkey), KV store, workers and router as child processes; an asynchronous context manager.

    `start()` returns when prompts are served. The workers load while the KV store starts: its address is reserved
    beforehand. The router starts last: its flags name every worker's address. Use it on the main thread's event
    loop (see ChildProcess).
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        on_progress: ProgressCallback | None = None,
        commands: ServiceCommands | None = None,
    ) -> None:
        """`on_progress(process name, progress)` is called on the event loop, with fraction 1 once it is ready."""
        self.spec = spec
        self.http = ""
        """host:port of the OpenAI API, once started."""
        self.grpc = ""
        """host:port of tandem.v1.InferenceService, once started."""
        self.metrics: dict[str, str] = {}
        """host:port of each process's Prometheus page by the process's name, once started."""
        self.children: dict[str, ChildProcess] = {}
        """All child processes by name (pid, log_path), in the order in which they started."""
        self._commands = commands if commands is not None else TandemCommands(spec)
        self._on_progress = on_progress if on_progress is not None else _ignore
        self._index: EmbeddedValkey | None = None
        self._workers: list[WorkerPlan] = []
        self._stores: dict[str, str] = {}
        self._exits: asyncio.Queue[ChildProcess] = asyncio.Queue()
        self._stopping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts everything; where that fails or is cancelled, stops what had started and raises.

        Raises ModelLoadError or ConfigError for a folder or an address that cannot be used, before any process
        starts; else the error of the first process that could not start (see `ChildProcess.ready`).
        """
        self._check()
        try:
            await self._start()
        except BaseException:
            await self.stop(_GIVE_UP_TIMEOUT_S)
            raise

    async def stop(self, timeout_s: float | None = None) -> None:
        """SIGTERM to the router, then the workers, the KV store, the index; idempotent, and safe to call twice at once.

        Each process may take `timeout_s` seconds (default: the spec's) to drain, then it gets SIGKILL.
        """
        if self._stopping is None:
            limit = self.spec.stop_timeout_s if timeout_s is None else timeout_s
            self._stopping = asyncio.create_task(self._stop(limit))
        await asyncio.shield(self._stopping)

    def kill(self) -> None:
        """SIGKILL to every child at once; `stop()` then returns without waiting for a drain."""
        for child in self.children.values():
            child.kill()

    async def next_exit(self) -> ChildProcess:
        """Waits for the next child that ends without being stopped."""
        return await self._exits.get()

    def _check(self) -> None:
        model = self.spec.model
        if not (model / "config.json").is_file():
            missing = "has no config.json" if model.is_dir() else "does not exist"
            raise ModelLoadError(f"model folder {model} {missing}", field="model", value=str(model))
        check_free(self.spec.http, "http")
        check_free(self.spec.grpc, "grpc")

    async def _start(self) -> None:
        # Imported here: it brings the Redis client, most of the time that `tandem status` would take to start.
        from services.kvstore.embedded import EmbeddedValkey

        cores = sorted(os.sched_getaffinity(0))
        num_workers = self.spec.num_prefill + self.spec.num_decode
        self._index = EmbeddedValkey()
        await self._index.start()
        plans = plan_workers(self.spec, share_cores(cores, num_workers))
        with ExitStack() as reserved:
            kvstore = reserved.enter_context(reserved_address())
            await self._spawn("kvstore", self._commands.kvstore(kvstore, self._index.url))
            if self.spec.has_store:
                self._stores[store_name(0)] = kvstore
                for number in range(1, self.spec.store_nodes):
                    name, address = store_name(number), reserved.enter_context(reserved_address())
                    self._stores[name] = address
                    await self._spawn(name, self._commands.store_node(number, address, self._index.url))
            stores = ",".join(f"{name}={address}" for name, address in self._stores.items())
            self._workers = [replace(plan, stores=stores) for plan in plans]
            for plan in self._workers:
                await self._spawn(plan.name, self._commands.worker(plan, kvstore))
            ready = await self._all_ready()
        workers: dict[WorkerRole, dict[str, str]] = {WorkerRole.PREFILL: {}, WorkerRole.DECODE: {}}
        for plan in self._workers:
            workers[plan.role][plan.name] = ready[plan.name].address
        router = await self._spawn("router", self._commands.router(workers, kvstore, stores))
        serving = await router.ready(self.spec.start_timeout_s)
        self._on_progress(router.name, Progress(0.9, "connecting to the workers"))
        http, grpc = serving.endpoints["http"], serving.endpoints["grpc"]
        await wait_until_serving(router, http, self.spec.start_timeout_s)
        self._on_progress(router.name, Progress(1.0, "ready"))
        self.http, self.grpc = http, grpc
        started = (*ready.items(), (router.name, serving))
        self.metrics = {name: page for name, event in started if (page := event.endpoints.get("metrics"))}

    async def _spawn(self, name: str, command: Sequence[str]) -> ChildProcess:
        log_path = self.spec.log_dir / f"{name}.log"
        child = ChildProcess(name, command, log_path, on_progress=self._on_progress, on_exit=self._on_exit)
        self.children[name] = child
        self._on_progress(name, Progress(0.0, "starting"))
        await child.start()
        return child

    async def _all_ready(self) -> dict[str, Ready]:
        """The ready event of every child so far, by name; raises the first error of any."""
        waits = [asyncio.create_task(self._ready(child)) for child in self.children.values()]
        try:
            return dict(zip(self.children, await asyncio.gather(*waits), strict=True))
        finally:
            for wait in waits:
                wait.cancel()

    async def _ready(self, child: ChildProcess) -> Ready:
        ready = await child.ready(self.spec.start_timeout_s)
        self._on_progress(child.name, Progress(1.0, "ready"))
        return ready

    def _on_exit(self, child: ChildProcess) -> None:
        if self._stopping is None:
            self._exits.put_nowait(child)

    async def _stop(self, timeout_s: float) -> None:
        workers = [plan.name for plan in self._workers]
        for stage in (["router"], workers, ["kvstore", *self._stores]):
            children = [self.children[name] for name in stage if name in self.children]
            await asyncio.gather(*(child.stop(timeout_s) for child in children))
        if self._index is not None:
            await self._index.stop()


def _ignore(name: str, progress: Progress) -> None:
    """Drops the progress."""
