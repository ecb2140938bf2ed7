"""What prefill and decode workers have in common: identity, sessions, load reports, index publishing, drain."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from services.worker.blocks.connector import KVConnector
from services.worker.blocks.prefix_fetch.fetch import Fetch
from services.worker.blocks.prefix_fetch.prefix_hint import PrefixHint
from services.worker.choices import dtype_name
from services.worker.host import EngineHost
from services.worker.load import LoadReporter
from services.worker.session import Session
from services.worker.shipments import ShipmentCounters
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
)
from shared.engine.sequence import EngineSequence, Goal
from shared.engine.structured_output import StructuredOutput
from shared.errors import InvalidRequest, Overloaded, PromptTooLong, TandemError
from shared.identity import WorkerRole
from shared.kv.fleet_key import encryption_of
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.convert import layout_to_proto, role_to_proto, sampling_from_proto
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.telemetry.logs import failure_level
from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.span_sink import SpanSink

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class Worker(ABC, Generic[CommandT, EventT]):
    """Base of the prefill and the decode worker. Every method runs on the event loop, and none blocks."""

    role: WorkerRole

    def __init__(
        self,
        host: EngineHost,
        publisher: IndexPublisher | None,
        connector: KVConnector,
        spans: SpanSink | None = None,
    ) -> None:
        """`spans` takes those of requests that come with a trace; None: nothing is recorded."""
        self.host = host
        self.spans = spans
        self.connector = connector
        self.sessions: set[Session[EventT]] = set()
        self.died = asyncio.Event()
        """Set when the engine cannot go on."""
        self.idle = asyncio.Event()
        """Set while no request is left."""
        self.idle.set()
        self._ending = False
        self._publisher = publisher
        self._holding: set[asyncio.Task[None]] = set()
        self.load = LoadReporter(host.transfer.counters, self._publish_load, connector)
        self.shipments = ShipmentCounters()
        """Of a prefill worker."""
        connector.nodes.on_change = self.load.flush

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
                logger.critical("the engine died", exc_info=error)
                self.died.set()
            case _:
                self.on_sequence_event(event)

    @abstractmethod
    def on_sequence_event(self, event: Event) -> None:
        """Events about sequences."""

    @abstractmethod
    def load_event(self, load: types_pb2.Load) -> EventT:
        """Wraps a load report."""

    @abstractmethod
    def hello_of(self, command: CommandT) -> types_pb2.Hello | None:
        """The Hello inside a command, or None."""

    @abstractmethod
    def welcome_event(self, welcome: types_pb2.Welcome) -> EventT:
        """Wraps the answer to Hello."""

    @abstractmethod
    def heartbeat_event(self, heartbeat: types_pb2.Heartbeat) -> EventT:
        """Wraps a heartbeat."""

    @abstractmethod
    def failed_event(self, failed: types_pb2.Failed) -> EventT:
        """Wraps a failure."""

    @abstractmethod
    def on_command(self, session: Session[EventT], command: CommandT) -> None:
        """Any command but Hello and Heartbeat. Raises a TandemError for one that is refused and has changed nothing."""

    @abstractmethod
    def abandon(self, sequence_id: str) -> None:
        """Frees what a command left behind that could not be carried out to its end."""

    @abstractmethod
    def on_closed(self, session: Session[EventT]) -> None:
        """The router is gone: free everything it holds."""

    # --- sessions

    def welcome(self) -> types_pb2.Welcome:
        """This worker's identity and capacity."""
        host, model = self.host, self.host.model
        return types_pb2.Welcome(
            worker=types_pb2.WorkerId(name=host.settings.name, incarnation=host.incarnation),
            role=role_to_proto(self.role),
            model_fingerprint=model.fingerprint,
            layout=layout_to_proto(model.layout),
            transfer_address=host.transfer.address,
            transfer_kind="ucx",
            num_blocks=model.num_blocks,
            max_model_len=model.max_model_len,
            max_num_seqs=host.settings.max_num_seqs,
            protocol_version=PROTOCOL_VERSION,
            model_name=model.name,
            rope_trained_len=model.roots.rope_trained_len,
            kernels=model.decoder.kernels.name,
            dtype=dtype_name(model.decoder.dtype),
            pool_bytes=model.num_blocks * model.layout.block_bytes,
            block_encryption=encryption_of(host.fleet_key),
            texts_digest=model.texts_digest,
            tp=host.settings.tp,
            pp=host.settings.pp,
            ep=host.settings.ep,
        )

    def take(self, session: Session[EventT], command: CommandT) -> None:
        """Carries out a command; one that cannot be fails its own request alone."""
        try:
            self.on_command(session, command)
        except Exception as error:
            request_id = _request_id(command)
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
                self.abandon(session.key(request_id))
            session.send(self.failed_event(types_pb2.Failed(request_id=request_id, error=to_proto(error))))

    def on_open(self, session: Session[EventT]) -> None:
        """A router is connected: it gets the present load at once, and the other routers its name."""
        self.sessions.add(session)
        self.load.flush()

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
        event = self.load_event(load)
        for session in self.sessions:
            session.send(event)

    # --- sequences

    def add_sequence(
        self,
        sequence: EngineSequence,
        hint: PrefixHint,
        on_start: Callable[[], bool],
        trace: TraceContext | None = None,
    ) -> Fetch:
        """Has a sequence computed here, behind what peers and store nodes have of its prefix.

        `hint` is what the router knows of that. `on_start` is called just before the engine gets the sequence, and
        says whether it is still wanted. `trace`: of the request's span, if it has one.
        """
        fetch = Fetch(trace)
        if not self.connector.fetches.may_bring(hint):
            if on_start():
                self.host.engine.submit(AddSequence(sequence))
            return fetch
        task = asyncio.create_task(self._add_behind_prefix(sequence, hint, fetch, on_start))
        self._holding.add(task)
        task.add_done_callback(self._holding.discard)
        return fetch

    async def _add_behind_prefix(
        self, sequence: EngineSequence, hint: PrefixHint, fetch: Fetch, on_start: Callable[[], bool]
    ) -> None:
        try:
            await self.connector.fetches.hold(sequence, hint, fetch)
        finally:  # a bug in there must not cost the request
            if on_start():
                self.host.engine.submit(AddSequence(sequence))
            else:
                fetch.stop()

    def build_sequence(
        self,
        sequence_id: str,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling: types_pb2.SamplingParams,
        salt: str,
        goal: Goal,
        ship_blocks: frozenset[int] = frozenset(),
        receiver: bytes = b"",
        tenant: str = "",
    ) -> EngineSequence:
        """A sequence from a command's fields. Raises PromptTooLong, InvalidRequest, Overloaded (draining, or too many
        structures wait to be compiled)."""
        if self.load.draining:
            raise Overloaded(f"worker {self.host.settings.name} is draining")
        model = self.host.model
        params = sampling_from_proto(sampling)
        if params.max_tokens is None or params.seed is None:
            field = "seed" if params.seed is None else "max_tokens"
            raise InvalidRequest(f"a command must carry {field}", field=f"sampling.{field}")
        vocab_size = model.decoder.config.vocab_size
        # An id that the model has no row for would not fail this request alone: it would end the engine.
        if not 0 < num_prompt_tokens <= len(token_ids):
            raise InvalidRequest(
                f"prompt must hold at least one token, num_prompt_tokens is {num_prompt_tokens} of {len(token_ids)}",
                field="prompt",
                limit=1,
            )
        _check_ids("prompt", token_ids, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
        _check_ids("bad_sequences", [token_id for bad in params.bad_sequences for token_id in bad], vocab_size)
        if any(index * model.layout.block_size >= len(token_ids) for index in ship_blocks):
            raise InvalidRequest(
                f"needed_blocks names block {max(ship_blocks)} of {len(token_ids)} tokens", field="needed_blocks"
            )
        total = num_prompt_tokens + params.max_tokens
        # A prefill worker holds the tokens it is given; where the answer may grow is the decode worker's to check.
        held = len(token_ids) if goal is Goal.FIRST_TOKEN else total
        if held > model.max_model_len:
            raise PromptTooLong(
                f"the request takes {held} tokens, the limit of worker {self.host.settings.name} is "
                f"{model.max_model_len}",
                field="max_tokens",
                limit=model.max_model_len,
            )
        if params.structured_output is not None:
            self._prepare(params.structured_output)
        return EngineSequence(
            sequence_id=sequence_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            sampling=params,
            hash_root=model.roots.of(salt, num_prompt_tokens),
            goal=goal,
            max_tokens_total=max(total, len(token_ids) + 1),
            eos_token_ids=frozenset(model.decoder.config.eos_token_ids),
            ship_blocks=ship_blocks,
            receiver=receiver,
            tenant=tenant,
        )

    def _prepare(self, structure: StructuredOutput) -> None:
        """Has a structure compiled while the prompt is computed. Raises InvalidRequest where it is known not to be
        compiled: no router lets it pass."""
        compiled = self.host.structures.prepare(structure)
        if compiled.done():
            compiled.result()


def _request_id(command: Any) -> str:
    """The request that a command is about; empty where it is about none."""
    kind = command.WhichOneof("command")
    return getattr(getattr(command, kind), "request_id", "") if kind else ""


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"{field} holds token id {max(token_ids)}, the model's are below {vocab_size}",
            field=field,
            limit=vocab_size - 1,
        )
