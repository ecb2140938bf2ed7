"""A worker: one engine, the sessions of its routers, load reports, index publishing, drain; its roles do the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from services.worker.adapters.pool import AdapterLease, AdapterPool, KnownAdapter
from services.worker.attempt import AttemptTrace, WorkerRequest, attempt_log, begin_trace, is_of
from services.worker.blocks.connector import KVConnector
from services.worker.blocks.prefix_fetch.fetch import Fetch, PrefixHint
from services.worker.host import EngineHost
from services.worker.machine.choices import dtype_name
from services.worker.session import Session
from services.worker.telemetry.load import LoadReporter, ShipmentCounters
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
from shared.errors import (
    ConfigError,
    Internal,
    InvalidRequest,
    ModelLoadError,
    NotFound,
    Overloaded,
    PromptTooLong,
    TakenOver,
    TandemError,
)
from shared.identity import Roles, WorkerRole, roles_text
from shared.kv.fleet_key import encryption_of
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.convert import layout_to_proto, roles_to_proto, sampling_from_proto
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.rpc.pb.tandem.v1.worker_pb2 import Reserve, Submit
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.seeds import SAMPLER_VERSION
from shared.structure.structured_output import StructuredOutput
from shared.telemetry.logs import RequestLog, failure_level
from shared.telemetry.tracing.span import SpanSink

logger = logging.getLogger(__name__)

HANDOFF_TIMEOUT_S = 60.0
"""A hand-off that has not ended by then has failed; a safety net beneath the protocol. Seconds."""

TakeCommand = Callable[[Session, Any], None]
"""Carries out one kind of command. Raises a TandemError for one that is refused and has changed nothing."""


class Role(Protocol):
    """What one role adds to a worker: its commands, and what the engine's events mean for its sequences.

    Every method runs on the event loop, and none blocks. A role ignores what concerns another role's sequences.
    """

    commands: Mapping[str, TakeCommand]
    """By the field of `Command`. Commands that several roles have in common, such as cancel, each role gets."""

    @property
    def requests(self) -> Mapping[str, WorkerRequest]:
        """The role's running requests, by sequence id."""

    @property
    def held(self) -> Collection[str]:
        """Sequence ids of all that it holds anything of, also of what ended and is not free yet."""

    def on_event(self, event: Event) -> None:
        """The engine's events about sequences, in order."""

    def abandon(self, sequence_id: str) -> None:
        """Frees a sequence, and sends nothing: its command could not be carried out, or its router is gone."""

    def fail(self, sequence_id: str, error: TandemError) -> None:
        """Frees a sequence, and sends the error to its router."""


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
        self.load = LoadReporter(host.transfer.counters, self._publish_load, connector, host.model.layout.groups)
        self.shipments = ShipmentCounters()
        """Of the prefill role."""
        connector.nodes.on_change = self.load.flush
        self.adapters = adapters
        self._adapters_due = False  # in the next report
        self._staged: dict[Session, Counter[str]] = {}  # adapters that a router had read and did not name yet
        if adapters is not None:
            adapters.on_change = self._on_adapters
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
                logger.critical("the engine died", exc_info=error)
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
                self._keep(self._change_adapter(session, body))
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
            num_blocks=model.layout.groups.max_tokens(model.num_blocks) // model.layout.block_size,
            max_model_len=model.max_model_len,
            max_num_seqs=host.settings.max_num_seqs,
            max_num_batched_tokens=host.settings.max_num_batched_tokens,
            protocol_version=PROTOCOL_VERSION,
            sampler_version=SAMPLER_VERSION,
            model_name=model.name,
            rope_trained_len=model.roots.rope_trained_len,
            kernels=model.decoder.kernels.name,
            dtype=dtype_name(model.decoder.dtype),
            pool_bytes=model.num_blocks * model.layout.block_bytes,
            quantization=model.decoder.quantization,
            weight_bytes=model.decoder.projection_bytes,
            block_encryption=encryption_of(host.fleet_key),
            texts_digest=model.texts_digest,
            tp=host.settings.tp,
            pp=host.settings.pp,
            ep=host.settings.ep,
            adapters=None if self.adapters is None else adapters_to_proto(self.adapters),
        )

    def on_open(self, session: Session) -> None:
        """A router is connected: it gets the present load at once, and the other routers its name."""
        self.sessions.add(session)
        self._follow_targets()
        self.load.flush()

    def on_closed(self, session: Session) -> None:
        """The router is gone: everything it holds is freed."""
        self.sessions.discard(session)
        self._follow_targets()
        for digest in self._staged.pop(session, Counter()).elements():
            assert self.adapters is not None
            self.adapters.unstage(digest)
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
        if self._adapters_due and self.adapters is not None:
            self._adapters_due = False
            load.adapters.CopyFrom(adapters_to_proto(self.adapters))
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
        """Until its adapter is there a request holds no place and no blocks: the engine does not know it."""
        assert item.adapter is not None
        try:
            await item.adapter.ready()
        except TandemError as error:
            item.fetch.stop()
            if role.requests.get(sequence.sequence_id) is item:
                role.fail(sequence.sequence_id, error)
            return
        self._add(sequence, item, on_start)

    # --- adapters

    def hold_adapter(self, command: Submit | Reserve) -> AdapterLease | None:
        """A request's hold on the adapter that it names, which begins to load where it is not there; None for none.
        Raises Overloaded where this worker does not know it."""
        if not command.adapter:
            return None
        if self.adapters is None:
            raise Overloaded(f"worker {self.host.settings.name} has no adapters", field="adapter")
        return self.adapters.hold(command.adapter)

    def _on_adapters(self) -> None:
        self._adapters_due = True
        self.load.flush()

    async def _change_adapter(
        self, session: Session, command: worker_pb2.LoadAdapter | worker_pb2.UnloadAdapter
    ) -> None:
        answer = worker_pb2.AdapterChanged(call=command.call)
        try:
            if self.adapters is None:
                raise InvalidRequest(f"worker {self.host.settings.name} takes no adapters", field="lora_path")
            if isinstance(command, worker_pb2.UnloadAdapter):
                if not command.digest:
                    self.adapters.remove(command.name)
                elif self._has_staged(session, command.digest):
                    self._staged[session][command.digest] -= 1
                    self.adapters.unstage(command.digest)
            else:
                known = await self._load_adapter(session, command, self.adapters)
                answer.adapter.CopyFrom(adapter_to_proto(command.name, known, self.adapters.resident))
        except Exception as error:
            known_error = error if isinstance(error, TandemError) else Internal(f"{type(error).__name__}: {error}")
            if isinstance(error, ModelLoadError | ConfigError):  # what the caller named cannot be served
                known_error = InvalidRequest(error.message, **{**error.details, "field": "lora_path"})
            logger.warning("adapter %r of router %s: %s", command.name, session.router_name, error)
            answer.error.CopyFrom(to_proto(known_error))
        session.send(adapter_changed=answer)

    async def _load_adapter(self, session: Session, command: worker_pb2.LoadAdapter, pool: AdapterPool) -> KnownAdapter:
        """Reads an adapter for a session, or names what was read for it; what has no name when the session ends is
        given up."""
        if command.digest:
            if not self._has_staged(session, command.digest):
                raise NotFound(f"no adapter {command.digest} was read", field="digest", value=command.digest)
            known = pool.name(command.name, command.digest)
            self._staged[session][command.digest] -= 1
            return known
        # Not on the event loop: to follow links on a network mount may take as long as it likes.
        known = await pool.stage(await asyncio.to_thread(pool.allowed, command.folder))
        if session in self.sessions:
            self._staged.setdefault(session, Counter())[known.digest] += 1
        else:
            pool.unstage(known.digest)
        return known

    def _has_staged(self, session: Session, digest: str) -> bool:
        return session in self._staged and self._staged[session][digest] > 0

    def report_prompt(self, item: WorkerRequest, message: types_pb2.SequenceTokens, computing_s: float) -> None:
        """A prompt has been computed here in `computing_s` seconds: writes what its first token's message says of it,
        and ends its fetch."""
        item.write_prompt(message, computing_s)
        if not item.fetch.num_tokens:
            self.connector.fetches.policy.note_compute(item.num_tokens - item.num_cached_tokens, computing_s)
        item.fetch.stop()

    def _check_pools(self) -> None:
        """Raises InvalidRequest (`sampling.pooling`) where no hidden states come of this worker."""
        decoder, name = self.host.model.decoder, self.host.settings.name
        is_split = decoder.is_split or decoder.num_stages > 1
        if is_split or self.host.settings.step_times is not None:
            why = "its model is split over processes" if is_split else "its device computes nothing"
            raise InvalidRequest(f"worker {name} pools no hidden states: {why}", field="sampling.pooling")

    def build_sequence(
        self,
        sequence_id: str,
        command: Submit | Reserve,
        goal: Goal,
        ship_blocks: frozenset[int] = frozenset(),
        receiver: bytes = b"",
    ) -> EngineSequence:
        """A sequence from a command's fields. Raises PromptTooLong, InvalidRequest, Overloaded (draining, or too many
        structures wait to be compiled)."""
        if self.load.draining:
            raise Overloaded(f"worker {self.host.settings.name} is draining")
        token_ids, num_prompt_tokens = list(command.token_ids), command.num_prompt_tokens
        model = self.host.model
        params = sampling_from_proto(command.sampling)
        if params.max_tokens is None or params.seed is None:
            field = "seed" if params.seed is None else "max_tokens"
            raise InvalidRequest(f"a command must carry {field}", field=f"sampling.{field}")
        if params.pooling:
            self._check_pools()
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
        groups = model.layout.groups
        if any(place // groups.size * groups.block_size >= len(token_ids) for place in ship_blocks):
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
            hash_root=model.roots.of(command.salt, num_prompt_tokens, command.adapter),
            goal=goal,
            max_tokens_total=max(total, len(token_ids) + 1),
            eos_token_ids=frozenset(model.decoder.config.eos_token_ids),
            ship_blocks=ship_blocks,
            receiver=receiver,
            tenant=command.tenant,
            priority=min(0, command.priority),
        )

    def _prepare(self, structure: StructuredOutput) -> None:
        """Has a structure compiled while the prompt is computed. Raises InvalidRequest where it is known not to be
        compiled: no router lets it pass."""
        compiled = self.host.structures.prepare(structure)
        if compiled.done():
            compiled.result()


RoleMakers = Mapping[WorkerRole, Callable[[Worker], Role]]
"""What makes each role of a worker."""


def adapter_to_proto(name: str, known: KnownAdapter, resident: Collection[str]) -> types_pb2.Adapter:
    """An adapter as routers get it; `resident`: digests of those in slots."""
    return types_pb2.Adapter(
        name=name,
        digest=known.digest,
        rank=known.rank,
        num_bytes=known.num_bytes,
        resident=known.digest in resident,
    )


def adapters_to_proto(pool: AdapterPool) -> types_pb2.AdapterList:
    """All that have names."""
    resident = pool.resident
    return types_pb2.AdapterList(adapters=[adapter_to_proto(name, known, resident) for name, known in pool.known()])


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"{field} holds token id {max(token_ids)}, the model's are below {vocab_size}",
            field=field,
            limit=vocab_size - 1,
        )
