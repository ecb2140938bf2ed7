"""The prefill worker: Submit → chunks → blocks shipped as they are sealed → first token → trailer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

from services.worker.attempt_trace import AttemptTrace, begin_trace
from services.worker.blocks.connector import KVConnector
from services.worker.blocks.prefix_fetch.fetch import Fetch
from services.worker.blocks.prefix_fetch.prefix_hint import PrefixHint
from services.worker.host import EngineHost
from services.worker.request_log import attempt_log, is_of
from services.worker.session import Session
from services.worker.worker import Worker
from shared.engine.messages import (
    AbortSequence,
    Event,
    FirstScheduled,
    NewToken,
    ReleaseBlocks,
    SequenceFailed,
    StepOutput,
)
from shared.engine.sequence import Goal
from shared.errors import InvalidRequest, TakenOver, TandemError
from shared.identity import WorkerRole
from shared.kv.handoff.outgoing_block import OutgoingBlock
from shared.kv.handoff.shipment import Shipment
from shared.kv.seal import Purpose
from shared.kv.transfer import TICKET_BITS
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.convert import finish_reason_to_proto, logprobs_to_proto
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import prefill_pb2, types_pb2
from shared.telemetry.logs import RequestLog, failure_level
from shared.telemetry.tracing.span import Attributes
from shared.telemetry.tracing.span_sink import SpanSink

logger = logging.getLogger(__name__)

PrefillSession = Session[prefill_pb2.PrefillEvent]


@dataclass(slots=True)
class _Submitted:
    """A request between Submit and its trailer."""

    session: PrefillSession
    request_id: str
    num_tokens: int
    shipment: Shipment
    notes: bool
    """Its receiver takes notes of what is sent."""
    log: RequestLog
    tenant: str = ""
    fetch: Fetch = field(default_factory=Fetch)
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    num_cached_tokens: int = 0
    shipping_since: float = 0.0
    trace: AttemptTrace | None = None
    first_token_at: float = 0.0

    def end_trace(self, error: Exception | None = None) -> None:
        """Its trailer has left, or the router gave it up."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        parts = trace.prompt_parts(self.fetch, self.queued_at, self.scheduled_at, self.first_token_at)
        if self.shipment.num_blocks or self.first_token_at:
            since = trace.chunks[0][1] if trace.chunks else self.first_token_at
            parts.append(trace.part("ship", since, time.perf_counter(), {"tandem.blocks": self.shipment.num_blocks}))
        attributes: Attributes = {
            "tandem.request_id": self.request_id,
            "gen_ai.usage.input_tokens": self.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.num_cached_tokens,
        }
        trace.record("prefill", attributes, parts, error)


class PrefillWorker(Worker[prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvent]):
    """Every accepted Submit ends in one trailer; its router gets a first token, a failure, or (after a Cancel)
    nothing."""

    role = WorkerRole.PREFILL

    def __init__(
        self,
        host: EngineHost,
        publisher: IndexPublisher | None,
        connector: KVConnector,
        spans: SpanSink | None = None,
    ) -> None:
        super().__init__(host, publisher, connector, spans)
        self._submitted: dict[str, _Submitted] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._shipments: dict[str, Shipment] = {}  # until the trailer left

    # --- commands

    def hello_of(self, command: prefill_pb2.PrefillCommand) -> types_pb2.Hello | None:
        return command.hello if command.HasField("hello") else None

    def welcome_event(self, welcome: types_pb2.Welcome) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(welcome=welcome)

    def heartbeat_event(self, heartbeat: types_pb2.Heartbeat) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(heartbeat=heartbeat)

    def failed_event(self, failed: types_pb2.Failed) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(failed=failed)

    def load_event(self, load: types_pb2.Load) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(load=load)

    def on_command(self, session: PrefillSession, command: prefill_pb2.PrefillCommand) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(session, command.submit)
            case "cancel":
                self._cancel(session.key(command.cancel.request_id), command.cancel.peer_active)
            case "peer_lost":
                self._peer_lost(session, command.peer_lost)
            case "take_over":
                self._take_over(session, command.take_over)
            case "drain":
                self.drain()
            case "undrain":
                self.undrain()
            case other:
                logger.warning("router %s sent %s in mid-session", session.router_name, other)

    def on_closed(self, session: PrefillSession) -> None:
        self.sessions.discard(session)
        for sequence_id in [key for key, item in self._submitted.items() if item.session is session]:
            self._abort(sequence_id)

    def _submit(self, session: PrefillSession, submit: prefill_pb2.Submit) -> None:
        sequence_id = session.key(submit.request_id)
        if sequence_id in self._shipments:
            raise InvalidRequest(f"request {submit.request_id!r} is running already", field="request_id")
        if submit.ticket >> TICKET_BITS:
            raise InvalidRequest(f"ticket has more than {TICKET_BITS} bits", field="ticket", limit=TICKET_BITS)
        shipment = Shipment(
            self.host.transfer,
            submit.transfer_address,
            submit.ticket,
            len(submit.needed_blocks),
            self.host.engine.blocks.outgoing,
            self._release,
            self.host.settings.handoff_timeout_s,
            self.host.seal(Purpose.HANDOFF, submit.ticket),
        )
        log = attempt_log(logger, submit.request_id, submit.traceparent)
        log.debug("request %s: %d tokens to prefill", submit.request_id, len(submit.token_ids))
        item = _Submitted(session, submit.request_id, len(submit.token_ids), shipment, submit.notes, log, submit.tenant)
        item.trace = begin_trace(self.spans, submit.traceparent)
        self._submitted[sequence_id] = item
        self._shipments[sequence_id] = shipment
        self.idle.clear()
        try:
            sequence = self.build_sequence(
                sequence_id,
                list(submit.token_ids),
                submit.num_prompt_tokens,
                submit.sampling,
                submit.salt,
                Goal.FIRST_TOKEN,
                frozenset(submit.needed_blocks),
                submit.transfer_address,
                submit.tenant,
            )
        except TandemError as error:
            self._fail(sequence_id, error)
            return
        context = item.trace.context if item.trace is not None else None
        item.fetch = self.add_sequence(sequence, PrefixHint.of(submit), lambda: self._start(sequence_id, item), context)

    def _start(self, sequence_id: str, item: _Submitted) -> bool:
        """The request enters the engine's queue; False if it was given up meanwhile."""
        item.queued_at = time.perf_counter()
        return self._submitted.get(sequence_id) is item

    def _cancel(self, sequence_id: str, receiver_active: bool) -> None:
        shipment = self._shipments.get(sequence_id)
        if shipment is not None and not receiver_active:
            shipment.drop_receiver()
        item = self._submitted.get(sequence_id)
        if item is not None:
            item.log.debug("request %s is cancelled", item.request_id)
        self._abort(sequence_id)

    def abandon(self, sequence_id: str) -> None:
        self._abort(sequence_id)

    def _peer_lost(self, session: PrefillSession, lost: types_pb2.PeerLost) -> None:
        """Blocks that were on their way to the worker when their request was cancelled are not taken any more."""
        if any(key.startswith(session.key("")) and key not in self._submitted for key in self._shipments):
            self.host.transfer.drop_peer(lost.transfer_address)

    def _take_over(self, session: PrefillSession, taken: types_pb2.TakeOver) -> None:
        """Ends what other routers' sessions have of the request."""
        for sequence_id, item in list(self._submitted.items()):
            if item.session is not session and is_of(taken, item.request_id, item.tenant):
                self._fail(sequence_id, TakenOver(f"request {taken.request_id!r} goes on at {session.router_name}"))

    def _abort(self, sequence_id: str, error: Exception | None = None) -> None:
        """Stops a request wherever it is; what it holds is released as soon as the sends under way are done."""
        item = self._submitted.pop(sequence_id, None)
        if item is not None:
            item.end_trace(error)
            item.fetch.stop()
            self.host.engine.submit(AbortSequence(sequence_id))
            self._close(sequence_id, item.shipment.abort())

    def _fail(self, sequence_id: str, error: TandemError) -> None:
        item = self._submitted[sequence_id]
        item.log.log(failure_level(error), "request %s failed: %s", item.request_id, error)
        failed = types_pb2.Failed(request_id=item.request_id, error=to_proto(error))
        item.session.send(prefill_pb2.PrefillEvent(failed=failed))
        self._abort(sequence_id, error)

    # --- engine events

    def on_sequence_event(self, event: Event) -> None:
        match event:
            case SequenceFailed(sequence_id, error):
                if sequence_id in self._submitted:
                    self._fail(sequence_id, error)
            case StepOutput(tokens, blocks, started):
                for first in started:
                    self._on_started(first)
                self._on_outgoing(blocks)
                for token in tokens:
                    self._on_first_token(token)
            case _:
                raise AssertionError(f"a prefill engine sent {type(event).__name__}")

    def _on_started(self, first: FirstScheduled) -> None:
        item = self._submitted.get(first.sequence_id)
        if item is not None:
            item.scheduled_at = item.scheduled_at or first.at
            item.num_cached_tokens = first.num_cached_tokens

    def _on_outgoing(self, blocks: Sequence[OutgoingBlock]) -> None:
        """The blocks that a step sealed, of all sequences."""
        outgoing: dict[str, list[OutgoingBlock]] = defaultdict(list)
        for block in blocks:
            outgoing[block.sequence_id].append(block)
        for sequence_id, batch in outgoing.items():
            item = self._submitted.get(sequence_id)
            if item is None:  # cancelled while the step ran
                for block in batch:
                    self._release(block)
                continue
            item.shipping_since = item.shipping_since or time.perf_counter()
            if item.trace is not None:
                item.trace.chunk(len(batch))
            if item.notes:
                item.shipment.add_noted(batch)
            else:
                item.shipment.add(*batch)

    def _on_first_token(self, token: NewToken) -> None:
        item = self._submitted.pop(token.sequence_id, None)
        if item is None:
            return  # cancelled while the step ran
        item.fetch.stop()
        item.first_token_at = time.perf_counter()
        computing_s = item.first_token_at - item.scheduled_at
        if not item.fetch.num_tokens:
            self.connector.fetches.policy.note_compute(item.num_tokens - item.num_cached_tokens, computing_s)
        num_fetched = min(item.fetch.num_tokens, item.num_cached_tokens)
        logprobs = logprobs_to_proto(token.token)
        tokens = types_pb2.SequenceTokens(
            request_id=item.request_id,
            token_ids=[token.token.token_id],
            logprobs=[logprobs] if logprobs is not None else [],
            finish_reason=finish_reason_to_proto(token.finish_reason),
            num_cached_tokens=item.num_cached_tokens,
            prefix_fetch_ms=item.fetch.waited_ms,
            num_fetched_tokens=num_fetched,
            num_peer_tokens=min(item.fetch.num_peer_tokens, num_fetched),
            prefill_queue_ms=(item.scheduled_at - item.queued_at) * 1e3,
            prefill_compute_ms=computing_s * 1e3,
            prompt_logprobs=filter(None, map(logprobs_to_proto, token.prompt_logprobs)),
        )
        item.log.debug("request %s has its first token", item.request_id)
        item.session.send(prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(tokens=tokens)))
        self._close(token.sequence_id, self._finish(token, item))

    async def _finish(self, token: NewToken, item: _Submitted) -> None:
        """Closes the hand-off behind its first token."""
        begun, failed = time.perf_counter(), False
        try:
            await item.shipment.finish(token.token.token_id, item.num_tokens, finished=token.finish_reason is not None)
            item.end_trace()
        except TandemError as error:
            failed = True
            item.end_trace(error)
            item.log.log(failure_level(error), "the hand-off of request %s failed: %s", item.request_id, error)
            message = types_pb2.Failed(request_id=item.request_id, error=to_proto(error))
            item.session.send(prefill_pb2.PrefillEvent(failed=message))
        now = time.perf_counter()
        self.shipments.ended(now - (item.shipping_since or begun), now - begun, failed=failed)

    def _release(self, block: OutgoingBlock) -> None:
        self.host.engine.submit(ReleaseBlocks((block.block_id,), block.receiver))

    def _close(self, sequence_id: str, ending: Coroutine[None, None, None]) -> None:
        """Runs the end of a shipment; the shipment is known until it is over."""
        task = asyncio.create_task(ending)
        self._closing.add(task)

        def closed(task: asyncio.Task[None]) -> None:
            self._closing.discard(task)
            del self._shipments[sequence_id]
            if not self._shipments:
                self.idle.set()

        task.add_done_callback(closed)
