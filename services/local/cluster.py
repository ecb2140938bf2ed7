"""Starts, watches and stops a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from services.local.commands import (
    ServiceCommands,
    TandemCommands,
    WorkerPlan,
    batch_folder,
    plan_workers,
    with_flags,
)
from services.local.model_pools import ModelPools
from services.local.parts import IndexPart, MemberPart, ServicePart
from services.local.places import INDEX, Places, ThisHost, check_free, taken
from services.local.spec import ClusterSpec, RouterPlace
from services.local.state_folder import StateFolder, unwritable
from services.local.supervisor import Change, Supervisor
from shared.address import Address
from shared.child_process import ChildProcess
from shared.cores.core_choice import share_machine
from shared.cores.quota import read_quota
from shared.cores.topology import read_topology
from shared.errors import DeadlineExceeded, WorkerLost
from shared.identity import WorkerRole
from shared.model.config.folder import check_model_folder
from shared.process_events import Progress

if TYPE_CHECKING:
    from services.kvstore.embedded import EmbeddedValkey

ProgressCallback = Callable[[str, Progress], None]

_GIVE_UP_TIMEOUT_S = 2.0
"""How long a process may take to end when the start failed, seconds: it has no requests to drain."""

_HURRY_S = 5.0
"""For routers to tell their clients that an answer ends early, seconds."""
KEY_BYTES = 32
_POLL_S = 0.02


class LocalCluster:
    """Index (Valkey), KV store, workers and router as child processes; an asynchronous context manager.

    `start()` returns when prompts are served. The workers load while the KV store starts: its address is reserved
    beforehand. The routers start last: their flags name every worker's address. All addresses stay reserved until
    `stop()`: where the spec asks for it, a process that dies is started again on its own. Use it on the main thread's
    event loop (see ChildProcess).
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        on_progress: ProgressCallback | None = None,
        commands: ServiceCommands | None = None,
        places: Places | None = None,
    ) -> None:
        """`on_progress(process name, progress)` is called on the event loop, with fraction 1 once it is ready. Closes
        the `places` when it stops."""
        self.spec = spec
        """The cluster's spec; once started, with the state folder that it got."""
        self.routers: tuple[RouterPlace, ...] = ()
        """Addresses of each router, once started."""
        self._commands = commands if commands is not None else TandemCommands(spec)
        self._on_progress = on_progress if on_progress is not None else _ignore
        self._index: EmbeddedValkey | None = None
        self._workers: list[WorkerPlan] = []
        self.stores: dict[str, str] = {}
        """host:port of the store nodes by name; the KV store is the first."""
        self._parts: dict[str, ServicePart] = {}
        self._places: Places = places if places is not None else ThisHost()
        self._environment = cluster_environment(loopback=self._places.on_loopback)
        self._changes: asyncio.Queue[Change] = asyncio.Queue()
        self._supervisor = Supervisor(self._on_change, restart=spec.restart, hang_timeout_s=spec.hang_timeout_s)
        self._stopping: asyncio.Task[None] | None = None
        self._state: StateFolder | None = None

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts everything; where that fails or is cancelled, stops what had started and raises.

        Raises ModelLoadError or ConfigError for a folder, a setting or an address that cannot be used, before any
        process starts; else the error of the first process that could not start (see `ChildProcess.ready`).
        """
        self._check()
        await asyncio.to_thread(self._commands.check)
        self._state = StateFolder.claim(self.spec.state_dir)
        self.spec = self.spec.replace(state_dir=self._state.path)
        try:
            await self._start()
        except BaseException:
            await self.stop(_GIVE_UP_TIMEOUT_S)
            raise

    async def stop(self, timeout_s: float | None = None) -> None:
        """SIGTERM to the routers, then the workers, the KV store, the index; idempotent, also called twice at once.

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

    def hurry(self) -> None:
        """While `stop()` runs: the routers end running answers at once, with an error that their clients see; what has
        not ended within _HURRY_S is killed."""
        for router in self.spec.routers:
            if router.name in self._parts:
                # Another signal than `stop` sends: two of one kind may arrive as one.
                self._parts[router.name].child.send_signal(signal.SIGINT)
        asyncio.get_running_loop().call_later(_HURRY_S, self.kill)

    @property
    def children(self) -> dict[str, ChildProcess]:
        """Each service's present process by its name (pid, log_path), in the order of their first start."""
        return {name: part.child for name, part in self._parts.items()}

    @property
    def metrics(self) -> dict[str, str]:
        """host:port of each service's Prometheus page by its name; another one after a restart but for the router."""
        return {name: page for name, part in self._parts.items() if (page := part.endpoints.get("metrics"))}

    @property
    def http(self) -> str:
        """host:port of the first router's OpenAI API, once started."""
        return self.routers[0].http if self.routers else ""

    @property
    def grpc(self) -> str:
        """host:port of the first router's tandem.v1.InferenceService, once started."""
        return self.routers[0].grpc if self.routers else ""

    @property
    def index_pid(self) -> int | None:
        """Process id of the server behind the index; None where it does not run."""
        return self._index.pid if self._index is not None else None

    async def next_change(self) -> Change:
        """Waits for the next process that ends without being stopped, or serves again."""
        return await self._changes.get()

    def take_changes(self) -> list[Change]:
        """All that `next_change` would give without waiting."""
        return [self._changes.get_nowait() for _ in range(self._changes.qsize())]

    def _check(self) -> None:
        for pools in self.spec.pools:
            check_model_folder(pools.model)
        for router in self.spec.routers:
            check_free(router.http, "http")
            check_free(router.grpc, "grpc")

    async def _start(self) -> None:
        # Imported here: it brings the Redis client, most of the time that `tandem status` would take to start.
        from services.kvstore.embedded import EmbeddedValkey

        log_dir = self.spec.log_dir
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            for own_log in (self._log_path, log_dir / "valkey.log"):
                own_log.write_bytes(b"")
        except OSError as error:
            raise unwritable(log_dir, error) from error
        self._index = EmbeddedValkey(
            log_path=log_dir / "valkey.log",
            bind=self._places.reserve_index(),
            place=lambda command: self._places.command(INDEX, command),
        )
        routers = [self._reserved(router) for router in self.spec.routers]
        await self._index.start()
        kvstore = self._places.reserve("kvstore")
        await self._spawn("kvstore", self._commands.kvstore(kvstore, self._index.url))
        await self._spawn_stores(kvstore, self._index.url)
        self._workers = self._plan_workers()
        for plan in self._workers:
            for one in (plan, *plan.members):
                kind = MemberPart if one.host else ServicePart
                await self._spawn(one.name, self._commands.worker(one, kvstore), kind)
        await self._all_ready()
        await self._start_routers(routers, kvstore)
        self._supervisor.start((IndexPart(self._index), *self._parts.values()))

    def _reserved(self, router: RouterPlace) -> RouterPlace:
        """The router with its addresses, held for it while the workers load."""
        held = {}
        for field, address in (("http", router.http), ("grpc", router.grpc)):
            try:
                held[field] = self._places.reserve(router.name, address)
            except OSError as error:
                raise taken(address, field, error) from error
        return replace(router, **held)

    def _plan_workers(self) -> list[WorkerPlan]:
        shares = share_machine(read_topology(), os.sched_getaffinity(0), read_quota(), self.spec.num_processes)
        plans = plan_workers(self.spec, shares)
        return [
            replace(
                plan,
                stores=self._named_stores(plan.pools),
                address=self._places.reserve(plan.name),
                meeting=self._places.reserve(plan.name) if plan.further else plan.meeting,
            )
            for plan in plans
        ]

    def _named_stores(self, pools: ModelPools | None = None) -> str:
        """The store nodes of a model, or all, as the services' flags name them."""
        names = self.spec.store_names if pools is None else self.spec.stores_of(pools)
        return ",".join(f"{name}={self.stores[name]}" for name in names)

    async def _spawn_stores(self, kvstore: str, redis_url: str) -> None:
        """The KV store is the first store node; starts the others."""
        if not self.spec.has_store:
            return
        first, *others = self.spec.store_names
        self.stores[first] = kvstore
        for number, name in enumerate(others, start=1):
            address = self._places.reserve(name)
            self.stores[name] = address
            await self._spawn(name, self._commands.store_node(number, address, redis_url))

    async def _start_routers(self, routers: Sequence[RouterPlace], kvstore: str) -> None:
        workers: dict[WorkerRole, dict[str, str]] = {WorkerRole.PREFILL: {}, WorkerRole.DECODE: {}}
        for plan in self._workers:
            workers[plan.role][plan.name] = plan.address
        started = []
        for number, place in enumerate(routers):
            command = self._commands.router(workers, kvstore, self._named_stores(), number)
            places = {
                "edge.batch.folder": str(batch_folder(self.spec.state_dir, place.name)),
                "http": place.http,
                "grpc": place.grpc,
            }
            started.append(await self._spawn(place.name, with_flags(command, **places)))
        self.routers = tuple([await self._router_serves(router) for router in started])

    async def _router_serves(self, router: ServicePart) -> RouterPlace:
        """Waits until it serves prompts."""
        serving = await router.ready()
        self._on_progress(router.name, Progress(0.9, "connecting to the workers"))
        http, grpc = serving.endpoints["http"], serving.endpoints["grpc"]
        await wait_until_serving(router.child, http, self.spec.start_timeout_s)
        self._on_progress(router.name, Progress(1.0, "ready"))
        return RouterPlace(router.name, http, grpc)

    async def _spawn(self, name: str, command: Sequence[str], kind: type[ServicePart] = ServicePart) -> ServicePart:
        log_path = self.spec.log_dir / f"{name}.log"
        command = self._places.command(name, command)
        part = kind(name, command, log_path, self.spec.start_timeout_s, self._on_progress, self._environment)
        self._parts[name] = part
        self._on_progress(name, Progress(0.0, "starting"))
        await part.start()
        self._log(f"{name} started, process {part.child.pid}")
        return part

    async def _all_ready(self) -> None:
        """Waits for every part so far; raises the first error of any."""
        waits = [asyncio.create_task(self._ready(part)) for part in self._parts.values()]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def _ready(self, part: ServicePart) -> None:
        await part.ready()
        self._on_progress(part.name, Progress(1.0, "ready"))

    def _on_change(self, change: Change) -> None:
        self._changes.put_nowait(change)
        self._log(str(change))

    @property
    def _log_path(self) -> Path:
        return self.spec.log_dir / "supervisor.log"

    def _log(self, line: str) -> None:
        # Its disk may be full, or the folder gone: what serves has to go on.
        with suppress(OSError), self._log_path.open("a") as log:
            log.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {line}\n")

    async def _stop(self, timeout_s: float) -> None:
        await self._supervisor.close()
        workers = [one.name for plan in self._workers for one in (plan, *plan.members)]
        routers = [router.name for router in self.spec.routers]
        for stage in (routers, workers, ["kvstore", *self.stores]):
            children = [self._parts[name].child for name in stage if name in self._parts]
            await asyncio.gather(*(child.stop(timeout_s) for child in children))
        if self._index is not None:
            await self._index.stop()
        self._places.close()
        if self._state is not None:
            self._state.release()


def _ignore(name: str, progress: Progress) -> None:
    """Drops the progress."""


def cluster_environment(*, loopback: bool) -> Mapping[str, str]:
    """For every process of one cluster, also where it is started again: a fleet key of its own and, where all are on
    `loopback`, UCX there alone, since no other host needs to reach it. Unlike flags, an environment shows to its own
    user alone."""
    key = secrets.token_hex(KEY_BYTES)
    keys = {f"TANDEM_{service}_FLEET_KEY": key for service in ("WORKER", "KVSTORE", "ROUTER")}
    return {**keys, "UCX_NET_DEVICES": "lo"} if loopback else keys


async def wait_until_serving(router: ChildProcess, http: str, timeout_s: float) -> None:
    """Returns once `GET /readyz` on the host:port `http` answers 200.

    Raises WorkerLost where the router ends meanwhile, DeadlineExceeded with the router's reason after `timeout_s`
    seconds.
    """
    reason = "it does not answer"
    try:
        async with asyncio.timeout(timeout_s):
            while reason := await _not_ready_reason(http):
                if router.returncode is not None:
                    raise WorkerLost(
                        f"{router.name} ended before it served ({router.exit_text()})",
                        process=router.name,
                        log=str(router.log_path),
                        log_tail=router.log_tail(),
                    )
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{router.name} serves no prompts after {timeout_s:g} s: {reason}",
            process=router.name,
            log=str(router.log_path),
        ) from error


async def _not_ready_reason(http: str) -> str:
    """Empty when prompts are served, to every model."""
    server = Address.parse(http, "http")
    try:
        reader, writer = await asyncio.open_connection(server.host, server.port)
    except OSError as error:
        return error.strerror or "it does not answer"
    try:
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    try:
        page = json.loads(body)
        if head.split(b" ", 2)[1:2] == [b"200"]:
            return next((f"{name}: {why}" for name, why in page.get("models", {}).items() if why), "")
        return str(page["reason"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "no reason given"
