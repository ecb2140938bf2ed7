"""The router's link to one worker: a session after another, and the requests that it has there.

A broken stream is the first failure detector, heartbeats both ways (`worker_stream.py`) are the second, gRPC's pings
the third.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from services.router.placement.views import Pool, Tier, Work
from services.router.workers.calls import WorkerCalls
from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.sessions import Greeting, WorkerSessions
from services.router.workers.standing import Standing
from services.router.workers.worker_stream import WorkerStream
from shared.errors import ModelMismatch, TandemError, WorkerDied, WorkerLost
from shared.identity import WorkerRole, roles_text
from shared.rpc.convert import roles_from_proto
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.tasks import end_task

MAX_KEPT_TRACES = 1024
"""Traces that wait for the next heartbeat to a worker; of more, the oldest are dropped."""
CLOSE_TIMEOUT_S = 2.0
"""For a retired worker to end the session after its last command; then the router breaks it off."""

logger = logging.getLogger(__name__)

Message = worker_pb2.Reserved | types_pb2.SequenceTokens | worker_pb2.FirstToken | worker_pb2.Arrivals

Receiver = Callable[[Message | TandemError], None]
"""Takes a worker's message about one attempt. Called on the event loop; must not block or raise. An error is the
attempt's last message from this worker."""


class WorkerLink:
    """Keeps one worker's session up and passes its messages to the attempts that they are about.

    `run()` reconnects until it is cancelled, or until the worker is retired and has no request of this router. When a
    stream breaks, or the worker is given up (`liveness.py`), every attempt on it gets a WorkerLost at once. The next
    session has a new epoch: the worker drops what it has of the one before, and no message of it reaches a request.

    Used from the event loop's thread alone. While the worker is connected and not retired, its view is in the pools of
    its roles.
    """

    def __init__(
        self,
        worker: DiscoveredWorker,
        greeting: Greeting,
        check: Callable[[types_pb2.Welcome], None],
        on_change: Callable[[], None],
        pools: Mapping[WorkerRole, Pool],
        *,
        on_lost: Callable[[types_pb2.PeerLost], None] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
        on_adapters: Callable[[WorkerLink, types_pb2.AdapterList, bool], None] | None = None,
        on_weights: Callable[[WorkerLink], None] | None = None,
    ) -> None:
        """`check` raises ModelMismatch for a worker that does not fit the fleet; `on_change` is called whenever the
        worker can do more or less than before. `pools` are the placement's, by role. `on_lost` is called after a
        session ended unasked. `token`: `FleetKey.token()`, which a worker wants before it drains. `on_adapters` gets
        the worker's adapters when a session begins (True) and whenever they have changed; `on_weights` is called when
        the worker has connected, and when it reports other weights than before or begins or ceases to take requests."""
        self.worker = worker
        self.name = worker.name
        self.roles = worker.roles
        """In which this router uses it; it may have others."""
        self.address = worker.address
        self.welcome: types_pb2.Welcome | None = None
        self.mismatch = ""
        """Why the worker is not connected, or was refused; empty while it is connected, or was not tried yet."""
        self._standing = Standing(worker.name, worker.label, {role: pools[role] for role in sorted(worker.roles)})
        self._limits = greeting.limits
        self._stream: WorkerStream | None = None  # while connected
        self._on_lost = on_lost
        self._waits_for: set[str] = set()  # workers that it waits for, by a Cancel
        self._check = check
        self._on_change = on_change
        self._sessions = WorkerSessions(
            worker.name,
            worker.address,
            greeting,
            self._welcomed,
            self._ended,
            credentials=credentials,
            token=token,
        )
        self._on_adapters = on_adapters
        self._on_weights = on_weights
        self.calls = WorkerCalls(self.send)
        """What operators and clients ask of the worker beside its requests."""
        self._receivers: dict[str, Receiver] = {}
        self._drained = asyncio.Event()
        self._kept_traces: deque[bytes] = deque(maxlen=MAX_KEPT_TRACES)

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
        return self._standing.queued

    def tier_of(self, adapter: str) -> Tier:
        """Where it has the adapter of this digest, by its last list."""
        return self._standing.tier_of(adapter)

    @property
    def load(self) -> types_pb2.Load:
        """The worker's newest load report."""
        return self._standing.load

    @property
    def retired(self) -> bool:
        """The discovery names the worker no more: no new work for it."""
        return self._standing.retired

    @property
    def suspicion(self) -> str:
        """Why it gets no new work although it is connected; empty where it is well."""
        return self._standing.suspicion

    @property
    def num_adapters(self) -> tuple[int, int]:
        """Adapters with a name, in all and ready to compute with; none while the worker is not connected."""
        return self._standing.num_adapters, self._standing.num_ready_adapters

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens; 0 while not connected."""
        return self.welcome.max_model_len if self.welcome is not None else 0

    @property
    def model_fingerprint(self) -> str:
        """The fingerprint of the weights that it has now; empty while not connected."""
        return self.welcome.model_fingerprint if self.welcome is not None else ""

    def fit(self, misfit: str) -> None:
        """Keeps new work away from a connected worker of other weights than the fleet's, for this reason; empty: it
        has the fleet's."""
        if self.connected and misfit != self.mismatch:
            self.mismatch = misfit
            self._standing.set_misfit(misfit)

    def open(
        self, request_id: str, receiver: Receiver, work: Work, *, num_blocks: int, num_answer_tokens: int = 0
    ) -> None:
        """Places a request here: the worker's messages about it go to `receiver`, and placement counts its work, its
        blocks and its answer from now on (see `Ledger.commit`). The command follows."""
        self._receivers[request_id] = receiver
        self._standing.commit(request_id, work, num_blocks, num_answer_tokens)

    def computed(self, request_id: str) -> None:
        """The request's first token came: none of its prompt is queued here any more."""
        self._standing.computed(request_id)

    def close(self, request_id: str) -> None:
        """The request is over for this worker: later messages about it are dropped."""
        self._receivers.pop(request_id, None)
        self._standing.release(request_id)
        self._check_drained()

    def refused(self) -> None:
        """The worker was full although the router's view had room: no more work until its next report."""
        self._standing.refuse()

    def reserve(self, reserve: worker_pb2.Reserve, token_ids: Iterable[int]) -> Iterable[int]:
        """Starts a sequence of these tokens on a worker that decodes; raises WorkerLost. Returns the tokens as the
        message's own repeated field, which another message copies in one go."""
        envelope = worker_pb2.Commands()
        command = envelope.commands.add(reserve=reserve).reserve
        command.token_ids.extend(token_ids)
        self._begin(reserve.request_id, envelope)
        return command.token_ids

    def submit(self, submit: worker_pb2.Submit, token_ids: Iterable[int]) -> None:
        """Starts a prompt of these tokens on a worker that prefills; raises WorkerLost."""
        envelope = worker_pb2.Commands()
        envelope.commands.add(submit=submit).submit.token_ids.extend(token_ids)
        self._begin(submit.request_id, envelope)

    def cancel(self, request_id: str, *, peer: str = "") -> None:
        """Ends a request on the worker; nothing to do where it is lost. `peer`: the worker on the other side of its
        hand-off, where that one is there and does its part until the end; see proto Cancel."""
        if self.connected:
            if peer:
                self._waits_for.add(peer)
            self.send(cancel=types_pb2.Cancel(request_id=request_id, peer_active=bool(peer), peer=peer))

    def send(self, **command: Any) -> None:
        """Queues a command, named by its field, such as `cancel=`; raises WorkerLost while the worker is not
        connected."""
        self._connected_stream().send(_envelope(**command))

    async def heard(self) -> None:
        """Returns once the worker was heard from anew, or is lost; at once where it sends no heartbeats."""
        if self._stream is not None:
            await self._stream.heard()

    def retire(self) -> None:
        """No new work from now on; running requests continue. Idempotent."""
        if not self.retired:
            logger.info(
                "worker %s at %s is removed, %d requests finish there", self.name, self.address, self.num_requests
            )
            self._standing.retire()
            self._check_drained()

    def keep_trace(self, trace_id: bytes) -> None:
        """The worker's spans of this trace (16 bytes), which was not sampled, are to be exported; the next heartbeat
        carries the request."""
        self._kept_traces.append(trace_id)

    def _check_drained(self) -> None:
        if self.retired and not self._receivers:
            self._drained.set()

    def _begin(self, request_id: str, envelope: worker_pb2.Commands) -> None:
        """Queues the command that begins a request; raises WorkerLost."""
        self._connected_stream().send(envelope.SerializeToString())
        self._standing.sent(request_id)

    def _connected_stream(self) -> WorkerStream:
        """The session's stream; raises WorkerLost while the worker is not connected."""
        if self._stream is None:
            raise WorkerLost(f"worker {self.name} is not connected")
        return self._stream

    async def run(self) -> None:
        """Keeps the session up; returns once the worker is retired and drained. Ends by being cancelled before."""
        sessions = asyncio.create_task(self._sessions.run(self._drained), name=f"session-{self.name}")
        try:
            await self._drained.wait()
            if self._stream is not None:
                self._stream.close_sending()
                await asyncio.wait({sessions}, timeout=CLOSE_TIMEOUT_S)
        finally:
            await end_task(sessions)
            await self._sessions.close()

    def _ended(self, reason: str, broke: bool) -> bool:
        """A session ended, or could not begin; returns whether the worker was well in it."""
        was_well = self.connected and not self.suspicion
        self._lost(reason, died=broke and self._may_have_died)
        return was_well

    @property
    def _may_have_died(self) -> bool:
        """Whether a connection that broke just now shows that the worker's process ended."""
        slept = self._stream is not None and self._stream.has_slept
        return not (self.load.draining or self.suspicion or slept)

    def _judge(self) -> None:
        """Keeps new work away from a worker that is suspected, until it is well again."""
        assert self._stream is not None, "a stream judges while it runs"
        before, now = self.suspicion, self._stream.suspicion
        self._standing.suspect(now)
        if bool(before) == bool(now):
            return
        if now:
            logger.warning("worker %s is suspected: %s", self.name, now)
        self._on_change()

    def peer_lost(self, lost: types_pb2.PeerLost) -> None:
        """The router has lost another worker: sends a PeerLost if this worker waits for that one after a Cancel."""
        if self.connected and lost.name in self._waits_for:
            self._waits_for.discard(lost.name)
            self.send(peer_lost=lost)

    def take_over(self, taken: types_pb2.TakeOver) -> None:
        """Sends the command where other routers are connected to the worker too."""
        if self.connected and len(self.load.routers) > 1:
            self.send(take_over=taken)

    def _next_heartbeat(self) -> bytes:
        kept = list(self._kept_traces)
        self._kept_traces.clear()
        return _envelope(heartbeat=types_pb2.Heartbeat(kept_traces=kept))

    def _on_event(self, event: worker_pb2.Event) -> None:
        """Takes every event after Welcome."""
        match event.WhichOneof("event"):
            case "step":
                for sequence in event.step.sequences:
                    self._deliver(sequence.request_id, sequence)
            case "first_token":
                self._deliver(event.first_token.tokens.request_id, event.first_token)
            case "reserved":
                self._standing.acknowledged(event.reserved.request_id)
                self._deliver(event.reserved.request_id, event.reserved)
            case "arrivals":
                if event.arrivals.request_id in self._receivers:
                    self._deliver(event.arrivals.request_id, event.arrivals)
                else:  # its first token was its last, and the trailer behind that may never come
                    self.send(cancel=types_pb2.Cancel(request_id=event.arrivals.request_id, peer_active=True))
            case "failed":
                self._deliver(event.failed.request_id, from_proto(event.failed.error))
            case "load":
                self._on_load(event.load)
            case "adapter_changed" | "weights_changed" | "session_closed":
                self.calls.take(event)
            case "heartbeat":
                if self._stream is not None:
                    self._stream.take_beat(event.heartbeat)
            case other:
                logger.warning("worker %s sent %s in mid-session", self.name, other)

    def _welcomed(self, welcome: types_pb2.Welcome) -> WorkerStream:
        """Connects a worker that fits; raises ModelMismatch for others."""
        if missing := self.roles - roles_from_proto(welcome.roles):
            raise ModelMismatch(f"{self.address} is not a {roles_text(missing)} worker")
        self._check(welcome)
        return self._connected(welcome)

    def _connected(self, welcome: types_pb2.Welcome) -> WorkerStream:
        """The worker may get work from now on."""
        logger.info("worker %s connected, incarnation %016x", self.name, welcome.worker.incarnation)
        self.welcome = welcome
        self.mismatch = ""
        self._waits_for.clear()
        self._stream = stream = WorkerStream(
            self.name, self._limits, self._next_heartbeat, self._on_event, self._judge, heartbeats=welcome.heartbeats
        )
        self._standing.begin(welcome, stream.suspicion)
        if welcome.HasField("adapters"):
            self._take_adapters(welcome.adapters, is_welcome=True)
        if self._on_weights is not None:
            self._on_weights(self)
        self._on_change()
        return stream

    def _lost(self, reason: str, *, died: bool = False) -> None:
        """The stream broke: every attempt on it gets a WorkerLost, a WorkerDied where the process ended."""
        if self._drained.is_set():
            logger.info("worker %s at %s: removed, its session is closed", self.name, self.address)
        elif self.connected or reason != self.mismatch:
            logger.warning("worker %s at %s: %s", self.name, self.address, reason)
        was, self.welcome = self.welcome, None
        self.mismatch = reason
        self._standing.end()
        if self._stream is not None:
            self._stream.end()
            self._stream = None
        receivers, self._receivers = self._receivers, {}
        for receive in receivers.values():
            receive((WorkerDied if died else WorkerLost)(f"worker {self.name} was lost: {reason}"))
        self.calls.fail(WorkerLost(f"worker {self.name} was lost: {reason}"))
        if was is not None:
            if self._on_lost is not None and not self._drained.is_set():
                self._on_lost(types_pb2.PeerLost(name=self.name, transfer_address=was.transfer_address))
            self._on_change()

    def _on_load(self, load: types_pb2.Load) -> None:
        if load.HasField("adapters"):
            self._take_adapters(load.adapters, is_welcome=False)
        before = self.load
        self._standing.report(load)
        if self.welcome is not None:
            if load.model_fingerprint:
                self.welcome.model_fingerprint = load.model_fingerprint
            is_other = (load.model_fingerprint, load.draining) != (before.model_fingerprint, before.draining)
            if is_other and self._on_weights is not None:
                self._on_weights(self)
        self._on_change()

    def _take_adapters(self, adapters: types_pb2.AdapterList, *, is_welcome: bool) -> None:
        self._standing.has_adapters(adapters)
        if self._on_adapters is not None and not self.retired:  # the fleet has forgotten a retired one
            self._on_adapters(self, adapters, is_welcome)

    def _deliver(self, request_id: str, message: Message | TandemError) -> None:
        receive = self._receivers.get(request_id)
        if receive is not None:  # else it was cancelled meanwhile
            receive(message)


def _envelope(**command: Any) -> bytes:
    envelope = worker_pb2.Commands()
    envelope.commands.add(**command)
    return envelope.SerializeToString()
