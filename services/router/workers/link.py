"""The router's end of a session with one worker. A broken stream is the failure detector."""

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
from shared.errors import ModelMismatch, TandemError, WorkerLost
from shared.identity import WorkerRole
from shared.rpc.convert import role_to_proto
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import decode_pb2, prefill_pb2, types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import channel

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
HELLO_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)

Message = decode_pb2.Reserved | types_pb2.SequenceTokens | prefill_pb2.FirstToken
CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


Receiver = Callable[[Message | TandemError], None]
"""Takes what a worker says about one attempt at a request, at once and without raising; an error ends it there."""


class WorkerLink(ABC, Generic[CommandT, EventT]):
    """Keeps one worker's session up and passes its messages to the attempts that they are about.

    `run()` reconnects until it is cancelled. When a stream breaks, every attempt on it gets a WorkerLost at once; a
    worker that returns has a new incarnation, and nothing of the old one reaches a request any more.
    """

    role: WorkerRole

    def __init__(
        self,
        name: str,
        address: str,
        router_name: str,
        check: Callable[[types_pb2.Welcome], None],
        on_change: Callable[[], None],
        pool: Pool,
        label: tuple[str, ...] = (),
    ) -> None:
        """`check` raises ModelMismatch for a worker that does not fit the fleet; `on_change` is called whenever the
        worker can do more or less than before. While it is connected, its view is in `pool`."""
        self.name = name
        self.address = address
        self.welcome: types_pb2.Welcome | None = None
        self.load = types_pb2.Load()
        self.mismatch = ""
        """Why a connected worker is not used."""
        self._router_name = router_name
        self._check = check
        self._on_change = on_change
        self._pool = pool
        self._label = label
        self._ledger: Ledger | None = None
        self._receivers: dict[str, Receiver] = {}
        self._outgoing: asyncio.Queue[CommandT] = asyncio.Queue()

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
        """What it still has to compute, as placement sees it; nothing while not connected."""
        return self._ledger.view.queued if self._ledger is not None else NO_WORK

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens; 0 while not connected."""
        return self.welcome.max_model_len if self.welcome is not None else 0

    def open(self, request_id: str, receiver: Receiver, work: Work, *, num_blocks: int) -> None:
        """From now on messages about the request go to `receiver`, and placement counts what it will take there."""
        self._receivers[request_id] = receiver
        if self._ledger is not None:
            self._ledger.commit(request_id, work, num_blocks=num_blocks)

    def computed(self, request_id: str) -> None:
        """The request's first token came: none of its prompt is queued there."""
        if self._ledger is not None:
            self._ledger.computed(request_id)

    def close(self, request_id: str) -> None:
        """Messages about the request are dropped from now on."""
        self._receivers.pop(request_id, None)
        if self._ledger is not None:
            self._ledger.release(request_id)

    def refused(self) -> None:
        """It found itself full against our view; no more work until its next report."""
        if self._ledger is not None:
            self._ledger.view.accepting = False

    def send(self, command: CommandT) -> None:
        """Queues a command; raises WorkerLost while the worker is not connected."""
        if not self.connected:
            raise WorkerLost(f"worker {self.name} is not connected")
        self._outgoing.put_nowait(command)

    def _give(self, request_id: str, command: CommandT) -> None:
        """Queues the command that gives the worker a request."""
        self.send(command)
        if self._ledger is not None:
            self._ledger.sent(request_id, time.perf_counter())

    def _acknowledged(self, request_id: str) -> None:
        """The worker has taken the request up."""
        if self._ledger is not None:
            self._ledger.acknowledged(request_id)

    async def run(self) -> None:
        """Connects, serves, reconnects; ends by being cancelled."""
        backoff_s = FIRST_BACKOFF_S
        async with channel(self.address) as link:
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
        """Wraps the first command."""

    @abstractmethod
    def _on_event(self, event: EventT) -> None:
        """Anything but Welcome: `_deliver` what is a request's, `_on_load` what is the worker's."""

    async def _write(self, call: grpc.aio.StreamStreamCall[CommandT, EventT]) -> None:
        while True:
            command = await self._outgoing.get()
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
            label=self._label,
        )
        self._ledger = Ledger(view)
        self._pool.add(view)
        self._on_change()

    def _lost(self, reason: str) -> None:
        """Every request on the stream learns it at once."""
        if self.connected or reason != self.mismatch:
            logger.warning("worker %s at %s: %s", self.name, self.address, reason)
        was_connected = self.connected
        self.mismatch = reason
        self.welcome = None
        self._ledger = None
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
            self._pool.told(self.name, load.routers)
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
