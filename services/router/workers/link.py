"""The router's end of the session with one worker. A broken stream is the first failure detector."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import grpc
import grpc.aio

from services.router.placement.ledger import Ledger
from services.router.placement.views import Pool, WorkerView
from services.router.placement.work import NO_WORK, Work
from services.router.workers.discovery import DiscoveredWorker
from shared.errors import ModelMismatch, TandemError, WorkerLost
from shared.identity import WorkerRole
from shared.rpc.convert import role_to_proto
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import decode_pb2, prefill_pb2, types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import channel
from shared.tasks import end_task

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
HELLO_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
"""For a retired worker to end the session after its last command; then the router breaks it off."""

logger = logging.getLogger(__name__)

Message = decode_pb2.Reserved | types_pb2.SequenceTokens | prefill_pb2.FirstToken
CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


Receiver = Callable[[Message | TandemError], None]
"""Takes a worker's message about one attempt. Called on the event loop; must not block or raise. An error is the
attempt's last message from this worker."""


class WorkerLink(ABC, Generic[CommandT, EventT]):
    """Keeps one worker's session up and passes its messages to the attempts that they are about.

    `run()` reconnects until it is cancelled, or until the worker is retired and has no request of this router. When a
    stream breaks, every attempt on it gets a WorkerLost at once. A worker that returns has a new incarnation; no
    message of the old one reaches a request.

    Used from the event loop's thread alone. While the worker is connected and not retired, its view is in the pool.
    """

    role: WorkerRole

    def __init__(
        self,
        worker: DiscoveredWorker,
        router_name: str,
        check: Callable[[types_pb2.Welcome], None],
        on_change: Callable[[], None],
        pool: Pool,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`check` raises ModelMismatch for a worker that does not fit the fleet; `on_change` is called whenever the
        worker can do more or less than before. `pool` is the placement's pool of its role."""
        self.worker = worker
        self.name = worker.name
        self.address = worker.address
        self.welcome: types_pb2.Welcome | None = None
        self.load = types_pb2.Load()
        self.mismatch = ""
        """Why the worker is not connected, or was refused; empty while it is connected, or was not tried yet."""
        self.retired = False
        """The discovery names the worker no more: no new work for it."""
        self._router_name = router_name
        self._check = check
        self._on_change = on_change
        self._pool = pool
        self._credentials = credentials
        self._ledger: Ledger | None = None
        self._receivers: dict[str, Receiver] = {}
        self._outgoing: asyncio.Queue[CommandT | None] = asyncio.Queue()  # None: no more commands will come
        self._drained = asyncio.Event()

    @property
    def connected(self) -> bool:
        """True between Welcome and the stream's end."""
        return self.welcome is not None

    @property
    def num_requests(self) -> int:
        """Requests of this router on the worker."""
        return len(self._receivers)

    @property
    def queued(self) -> Work:
        """The prompt tokens that it still has to compute, by the router's view; none while not connected."""
        return self._ledger.view.queued if self._ledger is not None else NO_WORK

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens; 0 while not connected."""
        return self.welcome.max_model_len if self.welcome is not None else 0

    def open(self, request_id: str, receiver: Receiver, work: Work, *, num_blocks: int) -> None:
        """Places a request here: the worker's messages about it go to `receiver`, and placement counts its work and
        blocks from now on. The command follows."""
        self._receivers[request_id] = receiver
        if self._ledger is not None:
            self._ledger.commit(request_id, work, num_blocks=num_blocks)

    def computed(self, request_id: str) -> None:
        """The request's first token came: none of its prompt is queued here any more."""
        if self._ledger is not None:
            self._ledger.computed(request_id)

    def close(self, request_id: str) -> None:
        """The request is over for this worker: later messages about it are dropped."""
        self._receivers.pop(request_id, None)
        if self._ledger is not None:
            self._ledger.release(request_id)
        self._check_drained()

    def refused(self) -> None:
        """The worker was full although the router's view had room: no more work until its next report."""
        if self._ledger is not None:
            self._ledger.view.accepting = False

    def send(self, command: CommandT) -> None:
        """Queues a command; raises WorkerLost while the worker is not connected."""
        if not self.connected:
            raise WorkerLost(f"worker {self.name} is not connected")
        self._outgoing.put_nowait(command)

    def retire(self) -> None:
        """No new work from now on; the requests that run here go on. Twice is fine."""
        if not self.retired:
            logger.info(
                "worker %s at %s is removed, %d requests finish there", self.name, self.address, self.num_requests
            )
            self.retired = True
            self._pool.remove(self.name)
            self._check_drained()

    def _check_drained(self) -> None:
        if self.retired and not self._receivers:
            self._drained.set()

    def _give(self, request_id: str, command: CommandT) -> None:
        """Queues the command that begins a request."""
        self.send(command)
        if self._ledger is not None:
            self._ledger.sent(request_id, time.perf_counter())

    def _acknowledged(self, request_id: str) -> None:
        """The worker answered the command that began the request: its next report counts it."""
        if self._ledger is not None:
            self._ledger.acknowledged(request_id)

    async def run(self) -> None:
        """Keeps the session up; returns once the worker is retired and drained. Ends by being cancelled before."""
        sessions = asyncio.create_task(self._run_sessions(), name=f"session-{self.name}")
        try:
            await self._drained.wait()
            if self.connected:
                self._outgoing.put_nowait(None)
                await asyncio.wait({sessions}, timeout=CLOSE_TIMEOUT_S)
        finally:
            await end_task(sessions)

    async def _run_sessions(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        async with channel(self.address, self._credentials) as link:
            while True:
                try:
                    await self._session(link)
                    reason = "the worker closed the session"
                except grpc.aio.AioRpcError as error:
                    reason = str(from_rpc_error(error, f"worker {self.name}"))
                except (TimeoutError, ModelMismatch, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
                    reason = str(error) or type(error).__name__
                if self.connected:
                    backoff_s = FIRST_BACKOFF_S
                self._lost(reason)
                if self._drained.is_set():
                    return
                await asyncio.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def _session(self, link: grpc.aio.Channel) -> None:
        call = self._open_stream(link)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = types_pb2.Hello(router_name=self._router_name, protocol_version=PROTOCOL_VERSION)
                await call.write(self._hello(hello))
                event = await call.read()
            if event is grpc.aio.EOF:
                return
            welcome: types_pb2.Welcome = event.welcome  # type: ignore[attr-defined]
            if welcome.role != role_to_proto(self.role):
                raise ModelMismatch(f"{self.address} is not a {self.role} worker")
            self._check(welcome)
            self._connected(welcome)
            writer = asyncio.create_task(self._write(call))
            try:
                while (event := await call.read()) is not grpc.aio.EOF:
                    self._on_event(cast("EventT", event))
            finally:
                writer.cancel()
        finally:
            call.cancel()

    @abstractmethod
    def _open_stream(self, link: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[CommandT, EventT]:
        """Opens the session of this kind of worker."""

    @abstractmethod
    def _hello(self, hello: types_pb2.Hello) -> CommandT:
        """The session's first command."""

    @abstractmethod
    def _on_event(self, event: EventT) -> None:
        """Takes every event after Welcome: those about a request go to `_deliver`, Load goes to `_on_load`."""

    async def _write(self, call: grpc.aio.StreamStreamCall[CommandT, EventT]) -> None:
        while True:
            command = await self._outgoing.get()
            if command is None:  # the worker ends the stream after it has read the last command
                await call.done_writing()
                return
            await call.write(command)

    def _connected(self, welcome: types_pb2.Welcome) -> None:
        logger.info("worker %s connected, incarnation %016x", self.name, welcome.worker.incarnation)
        self.welcome = welcome
        self.mismatch = ""
        self.load = types_pb2.Load(num_free_blocks=welcome.num_blocks, num_total_blocks=welcome.num_blocks)
        view = WorkerView(
            self.name,
            num_free_blocks=welcome.num_blocks,
            num_total_blocks=welcome.num_blocks,
            num_requests=0,
            max_num_seqs=welcome.max_num_seqs,
            num_queued_tokens=0,
            label=self.worker.label,
        )
        self._ledger = Ledger(view)
        if not self.retired:
            self._pool.add(view)
        self._on_change()

    def _lost(self, reason: str) -> None:
        """The stream broke: every attempt on it gets a WorkerLost."""
        if self._drained.is_set():
            logger.info("worker %s at %s: removed, its session is closed", self.name, self.address)
        elif self.connected or reason != self.mismatch:
            logger.warning("worker %s at %s: %s", self.name, self.address, reason)
        was_connected = self.connected
        self.mismatch = reason
        self.welcome = None
        self._ledger = None
        if not self.retired:  # else another link may have this name by now
            self._pool.remove(self.name)
        self._outgoing = asyncio.Queue()
        receivers, self._receivers = self._receivers, {}
        for receive in receivers.values():
            receive(WorkerLost(f"worker {self.name} was lost: {reason}"))
        if was_connected:
            self._on_change()

    def _on_load(self, load: types_pb2.Load) -> None:
        self.load = load
        if self._ledger is not None:
            self._ledger.view.num_total_blocks = load.num_total_blocks
            self._ledger.view.accepting = not load.draining
            if not self.retired:
                self._pool.update_routers(self.name, load.routers)
            self._ledger.report(
                num_free_blocks=load.num_free_blocks,
                num_requests=load.num_running + load.num_waiting,
                num_queued_tokens=load.num_queued_tokens,
                now_s=time.perf_counter(),
            )
        self._on_change()

    def _deliver(self, request_id: str, message: Message | TandemError) -> None:
        receive = self._receivers.get(request_id)
        if receive is not None:  # else it was cancelled meanwhile
            receive(message)
