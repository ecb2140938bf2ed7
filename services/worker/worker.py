"""A worker: one engine, the sessions of its routers, load reports, index publishing, drain; its roles do the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from services.worker.adapters.adapter_pool import AdapterPool
from services.worker.adapters.router_adapters import RouterAdapters
from services.worker.attempt import AttemptTrace, WorkerRequest, attempt_log, begin_trace, is_of
from services.worker.blocks.connector import KVConnector
from services.worker.blocks.prefix_fetch.fetch import Fetch, PrefixHint
from services.worker.host import EngineHost
from services.worker.role import Role
from services.worker.sequences import sequence_of, session_of
from services.worker.session import Session
from services.worker.telemetry.load_report import LoadReporter, ShipmentCounters
from services.worker.weights.change import WeightChanges
from shared.engine.messages import (
    AddSequence,
    BlocksAdopted,
    BlocksHeld,
    CacheFlushed,
    EngineDied,
    EngineLoad,
    Event,
    FetchPrepared,
    PoolChanged,
    SequenceEnded,
    SetTargets,
)
from shared.engine.sequence import EngineSequence, Goal
from shared.engine.speculation.speculator import GuessCounters
from shared.errors import (
    InvalidRequest,
    Overloaded,
    TakenOver,
    TandemError,
)
from shared.fingerprints import weights_digest
from shared.identity import Roles, WorkerRole, roles_text
from shared.kernels.pool_view import dtype_name
from shared.kv.fleet_key import encryption_of
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.convert import layout_to_proto, roles_to_proto
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.rpc.pb.tandem.v1.worker_pb2 import Reserve, Submit
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.seeds import SAMPLER_VERSION
from shared.telemetry.logs import RequestLog, failure_level
from shared.telemetry.tracing.span import SpanSink

logger = logging.getLogger(__name__)


class Worker:
    """One engine with one or both roles. Every method runs on the event loop, and none blocks."""

    def __init__(
        self,
        host: EngineHost,
        publisher: IndexPublisher | None,
        connector: KVConnector,
        roles: RoleMakers,
        spans: SpanSink | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        """`roles`: what makes each of its roles. `spans` takes those of requests that come with a trace; None: nothing
        is recorded. `adapters`: those that requests may ask for; None: none."""
        self.host = host
        self.spans = spans
        self.connector = connector
        self.sessions: set[Session] = set()
        self.died = asyncio.Event()
        """Set when the engine has failed and cannot continue."""
        self.idle = asyncio.Event()
        """Set while no request is left."""
        self.idle.set()
        self._ending = False
        self._tpot_target_s = 0.0  # the routers'
        self._publisher = publisher
        self._holding: set[asyncio.Task[None]] = set()
        self.load = LoadReporter(host.transfer.counters, self._publish_load, connector)
        self.shipments = ShipmentCounters()
        """Counters of the prefill role's shipments."""
        connector.nodes.on_change = self.load.flush
        self.adapters = adapters
        self.router_adapters = RouterAdapters(adapters, host.settings.name)
        if adapters is not None:
            adapters.on_change = self._on_adapters
        self.weights = WeightChanges(self)
        self.roles: Roles = frozenset(roles)
        self._roles = {role: make(self) for role, make in roles.items()}

    # --- from the engine

    def on_event(self, event: Event) -> None:
        """The engine's events, in order."""
        match event:
            case EngineLoad():
                self.load.update(event)
            case PoolChanged(sealed, evicted):
                if self._publisher is not None:
                    self._publisher.offer(sealed, evicted)
                self.connector.on_event(event)
            case SequenceEnded() | BlocksHeld() | FetchPrepared() | BlocksAdopted() | CacheFlushed():
                self.connector.on_event(event)
            case EngineDied(error):
                if not self.died.is_set():  # the loss of a rank, which needs no traceback, is seen twice
                    logger.critical("the engine died: %s", error, exc_info=not isinstance(error, TandemError) and error)
                self.died.set()
            case _:
                for role in self._roles.values():
                    role.on_event(event)

    # --- commands

    def take(self, session: Session, command: worker_pb2.Command) -> None:
        """Carries out a command; one that cannot be fails its own request alone."""
        kind = command.WhichOneof("command")
        body = getattr(command, kind) if kind is not None else None
        try:
            self._carry_out(session, kind, body)
        except Exception as error:
            request_id = getattr(body, "request_id", "")
            level = failure_level(error) if isinstance(error, TandemError) else logging.ERROR
            logger.log(
                level,
                "router %s, request %s: %s",
                session.router_name,
                request_id,
                error,
                exc_info=level >= logging.ERROR,
            )
            if not request_id:
                return
            if not isinstance(error, TandemError):
                for role in self._roles.values():
                    role.abandon(session.key(request_id))
            session.send(failed=types_pb2.Failed(request_id=request_id, error=to_proto(error)))

    def _carry_out(self, session: Session, kind: str | None, body: Any) -> None:
        """Any command but Hello and Heartbeat. Raises a TandemError for one that is refused."""
        match kind:
            case "drain":
                self.drain()
            case "undrain":
                self.undrain()
            case "load_adapter" | "unload_adapter":
                self._keep(self.router_adapters.change(session, body))
            case "change_weights":
                self._keep(self.weights.change(session, body))
            case "close_session":
                self._keep(self._close_session(session, body))
            case "expect_session":
                self.connector.server.expect_session(session_of(body.tenant, body.session), body.next_turn_s)
            case "take_over":
                self._take_over(session, body)
            case _:
                takers = [role.commands[kind] for role in self._roles.values() if kind and kind in role.commands]
                for take in takers:
                    take(session, body)
                if not takers and hasattr(body, "request_id"):
                    raise InvalidRequest(f"a {roles_text(self.roles)} worker takes no {kind}", field="command")
                if not takers:
                    logger.warning("router %s sent %s in mid-session", session.router_name, kind)

    async def _close_session(self, session: Session, closed: worker_pb2.CloseSession) -> None:
        num_blocks = await self.connector.server.close_session(session_of(closed.tenant, closed.session))
        session.send(session_closed=worker_pb2.SessionClosed(call=closed.call, num_blocks=num_blocks))

    def _take_over(self, session: Session, taken: types_pb2.TakeOver) -> None:
        """Ends the request in the sessions of other routers."""
        error = TakenOver(f"request {taken.request_id!r} continues at {session.router_name}")
        for role in self._roles.values():
            for sequence_id, item in list(role.requests.items()):
                if item.session is not session and is_of(taken, item.request_id, item.tenant):
                    role.fail(sequence_id, error)

    def note_idle(self) -> None:
        """Updates the idle state; called when a role has begun or ended a request."""
        if any(role.held for role in self._roles.values()):
            self.idle.clear()
        else:
            self.idle.set()

    # --- sessions

    def welcome(self) -> types_pb2.Welcome:
        """This worker's identity and capacity."""
        host, model = self.host, self.host.model
        return types_pb2.Welcome(
            worker=types_pb2.WorkerId(name=host.settings.name, incarnation=host.incarnation),
            roles=roles_to_proto(self.roles),
            model_fingerprint=model.fingerprint,
            layout=layout_to_proto(model.layout),
            transfer_address=host.transfer.address,
            transfer_kind="ucx",
            num_blocks=model.num_blocks,
            max_model_len=model.max_model_len,
            max_num_seqs=host.settings.max_num_seqs,
            max_num_batched_tokens=host.settings.max_num_batched_tokens,
            protocol_version=PROTOCOL_VERSION,
            sampler_version=SAMPLER_VERSION,
            model_name=model.name,
            rope_trained_len=model.roots.rope_trained_len,
            kernels=model.kernels,
            dtype=dtype_name(model.dtype),
            pool_bytes=model.num_blocks * model.layout.block_bytes,
            quantization=model.quantization,
            weight_bytes=model.weight_bytes,
            block_encryption=encryption_of(host.fleet_key),
            texts_digest=model.texts_digest,
            tp=host.settings.tp,
            pp=host.settings.pp,
            ep=host.settings.ep,
            adapters=self.router_adapters.listed(),
        )

    def on_open(self, session: Session) -> None:
        """A router is connected: it gets the present load at once, and the other routers its name."""
        self.sessions.add(session)
        self.router_adapters.opened(session)
        self._follow_targets()
        self.load.flush()

    def on_closed(self, session: Session) -> None:
        """The router is gone: everything it holds is freed."""
        self.sessions.discard(session)
        self._follow_targets()
        self.weights.left(session)
        self.router_adapters.closed(session)
        for role in self._roles.values():
            for sequence_id in [key for key, item in role.requests.items() if item.session is session]:
                role.abandon(sequence_id)

    def _follow_targets(self) -> None:
        """The engine's steps keep the least target of the routers, unless the worker's settings have one."""
        if self.host.settings.tpot_target_ms >= 0:
            return
        targets = [session.hello.tpot_target_s for session in self.sessions]
        least = min((target for target in targets if target > 0), default=0.0)
        if least != self._tpot_target_s:
            self._tpot_target_s = least
            self.host.engine.submit(SetTargets(least))

    async def flush_cache(self) -> int:
        """Forgets all cached blocks, in the index too; returns how many there were."""
        num_blocks, _ = await self.connector.server.flush(None)
        return num_blocks

    def on_engine_changed(self) -> None:
        """Another engine runs: it does not know the targets yet."""
        self._tpot_target_s = 0.0
        self._follow_targets()

    def drain(self, *, for_good: bool = False) -> None:
        """Takes no new work from now on, and reports that to the routers. `for_good`: `undrain` changes nothing."""
        self._ending |= for_good
        self.load.draining = True
        self.load.flush()

    def undrain(self) -> None:
        """Takes new work again, and reports that; a no-op where the process is about to end."""
        if self._ending:
            logger.warning("not undrained: this process is about to end")
            return
        self.load.draining = False
        self.load.flush()

    def _publish_load(self, load: types_pb2.Load) -> None:
        routers = {session.router_name for session in self.sessions}
        if len(routers) > 1:
            load.routers.extend(sorted(routers))
        steps = self.host.engine.steps
        load.num_steps, load.busy_s = steps.num_steps, steps.busy_s
        load.guesses.extend(_guesses_to_proto(self.host.guesses))
        self.router_adapters.report(load)
        load.roles.extend(roles_to_proto(self.roles))
        report = worker_pb2.Events(events=[worker_pb2.Event(load=load)]).SerializeToString()
        for session in self.sessions:
            session.put(report)

    # --- sequences

    def begin(self, session: Session, command: Submit | Reserve) -> tuple[str, RequestLog, AttemptTrace | None]:
        """The sequence id of a request that begins, its log and its trace. Raises InvalidRequest where the session has
        a request of that name."""
        sequence_id = session.key(command.request_id)
        if any(sequence_id in role.held for role in self._roles.values()):
            raise InvalidRequest(f"request {command.request_id!r} is running already", field="request_id")
        log = attempt_log(logger, command.request_id, command.traceparent)
        return sequence_id, log, begin_trace(self.spans, command.traceparent)

    def compute(self, sequence: EngineSequence, item: WorkerRequest, command: Submit | Reserve, role: Role) -> None:
        """Has a request's sequence computed here, behind what peers and store nodes have of its prefix; unless the role
        has given the request up by then."""
        hint = PrefixHint.of(command)
        item.fetch = Fetch(item.trace.context if item.trace is not None else None)

        def on_start() -> bool:
            item.queued_at = time.perf_counter()
            return role.requests.get(sequence.sequence_id) is item

        if not self.connector.fetches.may_bring(hint):
            if item.has_adapter:
                self._add(sequence, item, on_start)
            else:
                self._keep(self._add_with_adapter(sequence, item, role, on_start))
            return
        self._keep(self._add_behind_prefix(sequence, hint, item, role, on_start))

    def _add(self, sequence: EngineSequence, item: WorkerRequest, on_start: Callable[[], bool]) -> None:
        if on_start():
            sequence.adapter = 0 if item.adapter is None else item.adapter.slot
            self.host.engine.submit(AddSequence(sequence))
        else:
            item.fetch.stop()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._holding.add(task)
        task.add_done_callback(self._holding.discard)

    async def _add_behind_prefix(
        self,
        sequence: EngineSequence,
        hint: PrefixHint,
        item: WorkerRequest,
        role: Role,
        on_start: Callable[[], bool],
    ) -> None:
        try:
            await self.connector.fetches.hold(sequence, hint, item.fetch)
        finally:  # a bug in there must not cost the request
            if item.has_adapter:
                self._add(sequence, item, on_start)
            else:
                await self._add_with_adapter(sequence, item, role, on_start)

    async def _add_with_adapter(
        self, sequence: EngineSequence, item: WorkerRequest, role: Role, on_start: Callable[[], bool]
    ) -> None:
        """Adds a sequence once its adapter is there; before that it has no place and no blocks in the engine."""
        assert item.adapter is not None
        try:
            await item.adapter.ready()
        except TandemError as error:
            item.fetch.stop()
            if role.requests.get(sequence.sequence_id) is item:
                role.fail(sequence.sequence_id, error)
            return
        self._add(sequence, item, on_start)

    def _on_adapters(self) -> None:
        self.router_adapters.are_due = True
        self.load.flush()

    def report_prompt(self, item: WorkerRequest, message: types_pb2.SequenceTokens, computing_s: float) -> None:
        """A prompt has been computed here in `computing_s` seconds: writes what its first token's message says of it,
        and ends its fetch."""
        item.write_prompt(message, computing_s)
        if not item.fetch.num_tokens:
            self.connector.fetches.policy.note_compute(item.num_tokens - item.num_cached_tokens, computing_s)
        item.fetch.stop()

    def build_sequence(
        self,
        sequence_id: str,
        command: Submit | Reserve,
        goal: Goal,
        ship_blocks: frozenset[int] = frozenset(),
        receiver: bytes = b"",
    ) -> EngineSequence:
        """A sequence from a command's fields. Raises PromptTooLong, InvalidRequest, Overloaded (draining, or too many
        structures wait to be compiled; or it serves other weights by now)."""
        if not self.load.takes_work:
            raise Overloaded(f"worker {self.host.settings.name} is draining")
        if command.weights and command.weights != weights_digest(self.host.model.fingerprint):
            raise Overloaded(f"worker {self.host.settings.name} serves other weights by now")
        return sequence_of(self.host, sequence_id, command, goal, ship_blocks, receiver)


def _guesses_to_proto(guesses: GuessCounters) -> Iterator[types_pb2.Guesses]:
    """Of the methods that have guessed. The engine's thread counts meanwhile."""
    for method, num_tokens in list(guesses.num_guesses.items()):
        if num_tokens:
            yield types_pb2.Guesses(method=method, num_tokens=num_tokens, num_accepted=guesses.num_accepted[method])


RoleMakers = Mapping[WorkerRole, Callable[[Worker], Role]]
"""Makers of a worker's roles."""
