"""The decode worker: Reserve → receives posted → join → tokens, all of a router's sequences in one message a step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from services.decode.request import DecodeRequest, DecodeSession
from services.decode.reservation import Arrival, Reservation
from services.worker.attempt_trace import begin_trace
from services.worker.blocks.connector import KVConnector
from services.worker.blocks.prefix_fetch.prefix_hint import PrefixHint
from services.worker.host import EngineHost
from services.worker.request_log import attempt_log, is_of
from services.worker.worker import Worker
from shared.engine.messages import (
    AbortSequence,
    Event,
    FirstScheduled,
    JoinSequence,
    NewToken,
    ReserveSequence,
    SequenceFailed,
    SequenceReserved,
    StepOutput,
)
from shared.engine.sequence import Goal
from shared.errors import Internal, InvalidRequest, TakenOver, TandemError, TransferFailed, WorkerLost
from shared.identity import WorkerRole
from shared.kv.block_memory import BlockMemory
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.receive_handoff import HandoffReceiver
from shared.kv.handoff.receiving import LostMemory, MemoryLost
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.convert import finish_reason_to_proto, logprobs_to_proto
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import decode_pb2, types_pb2
from shared.telemetry.logs import failure_level
from shared.telemetry.tracing.span_sink import SpanSink

logger = logging.getLogger(__name__)


class DecodeWorker(Worker[decode_pb2.DecodeCommand, decode_pb2.DecodeEvent]):
    """A reserved sequence's blocks are freed only when no receive can write to them any more."""

    role = WorkerRole.DECODE

    def __init__(
        self,
        host: EngineHost,
        publisher: IndexPublisher | None,
        connector: KVConnector,
        spans: SpanSink | None = None,
    ) -> None:
        super().__init__(host, publisher, connector, spans)
        self._requests: dict[str, DecodeRequest] = {}
        self._lost = LostMemory()
        self._arrival_check = ArrivalCheck(host.model.layout.block_bytes)

    # --- commands

    def hello_of(self, command: decode_pb2.DecodeCommand) -> types_pb2.Hello | None:
        return command.hello if command.HasField("hello") else None

    def welcome_event(self, welcome: types_pb2.Welcome) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(welcome=welcome)

    def heartbeat_event(self, heartbeat: types_pb2.Heartbeat) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(heartbeat=heartbeat)

    def failed_event(self, failed: types_pb2.Failed) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(failed=failed)

    def load_event(self, load: types_pb2.Load) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(load=load)

    def on_command(self, session: DecodeSession, command: decode_pb2.DecodeCommand) -> None:
        match command.WhichOneof("command"):
            case "reserve":
                self._reserve(session, command.reserve)
            case "cancel":
                cancel = command.cancel
                self._cancel(session.key(cancel.request_id), sender_active=cancel.peer_active, sender=cancel.peer)
            case "peer_lost":
                self._peer_lost(session, command.peer_lost)
            case "take_over":
                self._take_over(session, command.take_over)
            case "reassign":
                self._reassign(session.key(command.reassign.request_id), command.reassign)
            case "drain":
                self.drain()
            case "undrain":
                self.undrain()
            case other:
                logger.warning("router %s sent %s in mid-session", session.router_name, other)

    def on_closed(self, session: DecodeSession) -> None:
        """Without its router the worker cannot know whether a prefill worker sends, or ever got the ticket: it does not
        wait for a trailer. What still comes for the ticket is dropped."""
        self.sessions.discard(session)
        for sequence_id in [key for key, item in self._requests.items() if item.session is session]:
            self._cancel(sequence_id, sender_active=False)

    def abandon(self, sequence_id: str) -> None:
        self._cancel(sequence_id, sender_active=False)

    def _peer_lost(self, session: DecodeSession, lost: types_pb2.PeerLost) -> None:
        """The trailers of this worker, which cancelled requests wait for, will not come."""
        for item in list(self._requests.values()):
            waits_for = item.reservation.sender if item.reservation is not None and item.reservation.cancelled else ""
            if item.session is session and waits_for == lost.name and item.receiving is not None:
                item.receiving.cancel()

    def _take_over(self, session: DecodeSession, taken: types_pb2.TakeOver) -> None:
        """Ends what other routers' sessions have of the request."""
        for sequence_id, item in list(self._requests.items()):
            is_cancelled = item.reservation is not None and item.reservation.cancelled
            if item.session is not session and not is_cancelled and is_of(taken, item.request_id, item.tenant):
                self._cancel(sequence_id, sender_active=False)
                self._send_failed(item, TakenOver(f"request {taken.request_id!r} goes on at {session.router_name}"))

    def _reassign(self, sequence_id: str, reassign: decode_pb2.Reassign) -> None:
        """Raises WorkerLost where the reservation cannot be served any more; the router then begins anew."""
        item = self._requests.get(sequence_id)
        if item is None or item.reservation is None:
            raise WorkerLost(f"request {reassign.request_id!r} has no reservation here")
        item.log.debug("request %s: its prefill worker %s is lost", item.request_id, reassign.lost)
        if item.receiving is not None:
            item.reservation.reassign(reassign.first_token if reassign.HasField("first_token") else None)
        elif item.first_token is not None:  # it joined before this came
            item.session.send(decode_pb2.DecodeEvent(reserved=item.reservation.joined(item.first_token)))

    def _reserve(self, session: DecodeSession, reserve: decode_pb2.Reserve) -> None:
        sequence_id = session.key(reserve.request_id)
        if sequence_id in self._requests:
            raise InvalidRequest(f"request {reserve.request_id!r} is running already", field="request_id")
        log = attempt_log(logger, reserve.request_id, reserve.traceparent)
        log.debug("request %s: blocks for %d tokens to reserve", reserve.request_id, len(reserve.token_ids))
        item = DecodeRequest(
            session, reserve.request_id, len(reserve.token_ids), reserve.prefill_here, log, reserve.tenant
        )
        item.trace = begin_trace(self.spans, reserve.traceparent)
        try:
            sequence = self.build_sequence(
                sequence_id,
                list(reserve.token_ids),
                reserve.num_prompt_tokens,
                reserve.sampling,
                reserve.salt,
                Goal.COMPLETION,
                tenant=reserve.tenant,
            )
        except TandemError as error:
            self._send_failed(item, error)
            return
        self._requests[sequence_id] = item
        self.idle.clear()
        if reserve.prefill_here:
            context = item.trace.context if item.trace is not None else None
            item.fetch = self.add_sequence(
                sequence, PrefixHint.of(reserve), lambda: self._start(sequence_id, item), context
            )
        else:
            self.host.engine.submit(ReserveSequence(sequence))

    def _start(self, sequence_id: str, item: DecodeRequest) -> bool:
        """The request enters the engine's queue; False if it was given up meanwhile."""
        item.queued_at = time.perf_counter()
        return self._requests.get(sequence_id) is item

    def _cancel(self, sequence_id: str, *, sender_active: bool, sender: str = "") -> None:
        item = self._requests.get(sequence_id)
        if item is None:
            return
        item.log.debug("request %s is cancelled", item.request_id)
        if item.receiving is None or item.reservation is None:
            # Running, waiting or not reserved yet: the engine alone holds it.
            self._forget(sequence_id)
            self.host.engine.submit(AbortSequence(sequence_id))
        else:
            item.reservation.cancelled, item.reservation.sender = True, sender
            if not sender_active or item.reservation.ended_by_cancel:
                item.receiving.cancel()

    # --- engine events

    def on_sequence_event(self, event: Event) -> None:
        match event:
            case SequenceReserved():
                self._on_reserved(event)
            case SequenceFailed(sequence_id, error):
                item = self._forget(sequence_id, error)
                if item is not None:
                    self._send_failed(item, error)
            case StepOutput(tokens, _, started):
                for first in started:
                    self._on_started(first)
                self._on_tokens(tokens)
            case _:
                raise AssertionError(f"a decode engine sent {type(event).__name__}")

    def _on_started(self, first: FirstScheduled) -> None:
        item = self._requests.get(first.sequence_id)
        if item is not None:
            at = item.scheduled.at if item.scheduled is not None else first.at
            item.scheduled = replace(first, at=at)

    def _on_reserved(self, reserved: SequenceReserved) -> None:
        item = self._requests.get(reserved.sequence_id)
        if item is None:
            return  # cancelled meanwhile: its AbortSequence is queued behind the reservation
        memory = self.host.engine.blocks.incoming
        try:
            buffers = [(block_id, memory(block_id)) for _, block_id in reserved.needed]
        except TransferFailed as error:
            self._forget(reserved.sequence_id, error)
            self.host.engine.submit(AbortSequence(reserved.sequence_id))
            self._send_failed(item, error)
            return
        arriving = {index: buffer for (index, _), (_, buffer) in zip(reserved.needed, buffers, strict=True)}
        reserve_ms = (time.perf_counter() - item.queued_at) * 1e3

        def answer(reserved: decode_pb2.Reserved) -> None:
            reserved.reserve_ms = reserve_ms
            item.session.send(decode_pb2.DecodeEvent(reserved=reserved))

        item.reservation = Reservation(
            item.request_id,
            reserved.num_cached_tokens,
            HandoffReceiver(self.host.transfer, self._arrival_check, arriving, item.num_tokens, self.host.fleet_key),
            answer,
            self.host.settings.handoff_timeout_s,
        )
        item.reserved_at = time.perf_counter()
        item.receiving = asyncio.create_task(self._receive(reserved.sequence_id, item, item.reservation, buffers))
        # Not the task's own last lines: a task that is cancelled before its first step never runs one.
        item.receiving.add_done_callback(lambda task: self._on_received(task, reserved.sequence_id, item, buffers))

    async def _receive(
        self, sequence_id: str, item: DecodeRequest, reservation: Reservation, buffers: list[tuple[int, BlockMemory]]
    ) -> tuple[Arrival | None, bool]:
        """What arrived of one sequence, and whether its blocks cannot be freed yet. `buffers`: where each block id's
        bytes arrive."""
        try:
            return await reservation.run(), False
        except MemoryLost as error:
            item.log.critical("the blocks of %d tokens are lost until their sender ends: %s", item.num_tokens, error)
            self._lost.keep(reservation.receiver.closed(), lambda: self._free_lost(sequence_id, buffers))
            if not reservation.cancelled:
                self._send_failed(item, error)
            return None, True
        except TandemError as error:
            if not reservation.cancelled:
                self._send_failed(item, error)
        except Exception as error:
            item.log.exception("request %s", item.request_id)
            if not reservation.cancelled:
                self._send_failed(item, Internal(f"{type(error).__name__}: {error}"))
        return None, False

    def _on_received(
        self,
        task: asyncio.Task[tuple[Arrival | None, bool]],
        sequence_id: str,
        item: DecodeRequest,
        buffers: list[tuple[int, BlockMemory]],
    ) -> None:
        """Ends the receiving of one sequence: it joins the batch, or its blocks are freed."""
        assert item.reservation is not None
        arrived, is_lost = (None, False) if task.cancelled() else task.result()
        item.receiving = None
        if arrived is not None and (arrived.finished or not item.reservation.cancelled):
            self._on_arrival(sequence_id, item, arrived, buffers)
        else:
            arrived = None
            if not is_lost:
                self.host.engine.submit(AbortSequence(sequence_id))
        if arrived is None or arrived.finished:
            self._forget(sequence_id)

    def _on_arrival(
        self, sequence_id: str, item: DecodeRequest, arrived: Arrival, buffers: list[tuple[int, BlockMemory]]
    ) -> None:
        assert item.reservation is not None
        receiver = item.reservation.receiver
        if receiver.num_damaged:
            item.log.warning("request %s: %d blocks arrived damaged", item.request_id, receiver.num_damaged)
        self.host.engine.blocks.store(buffers)
        item.joined_at = time.perf_counter()
        item.first_token = arrived.first_token
        self.host.engine.submit(
            JoinSequence(
                sequence_id,
                arrived.first_token,
                receiver.checksums,
                frozenset(receiver.damaged),
                receiver.num_damaged,
            )
        )

    def _free_lost(self, sequence_id: str, buffers: Sequence[tuple[int, BlockMemory]]) -> None:
        """Their silent sender cannot write to them any more."""
        logger.warning("%d blocks of sequence %s are safe again, and free", len(buffers), sequence_id)
        self.host.engine.submit(AbortSequence(sequence_id))

    def _on_tokens(self, tokens: tuple[NewToken, ...]) -> None:
        """One Step message for each router that has sequences in this engine step."""
        steps: dict[DecodeSession, list[types_pb2.SequenceTokens]] = defaultdict(list)
        for token in tokens:
            item = self._requests.get(token.sequence_id)
            if item is None:
                continue  # cancelled while the step ran
            message = types_pb2.SequenceTokens(
                request_id=item.request_id,
                token_ids=(token.token.token_id,),
                finish_reason=finish_reason_to_proto(token.finish_reason),
            )
            logprobs = logprobs_to_proto(token.token)
            if logprobs is not None:
                message.logprobs.append(logprobs)
            message.prompt_logprobs.extend(filter(None, map(logprobs_to_proto, token.prompt_logprobs)))
            if not item.reported:
                self._report_first(item, message)
            if token.finish_reason is not None:
                message.decode_ms = (time.perf_counter() - item.joined_at) * 1e3
                message.preempted_ms = token.preempted_s * 1e3
                item.log.debug("request %s is finished", item.request_id)
                self._forget(token.sequence_id)
            steps[item.session].append(message)
        for session, sequences in steps.items():
            session.send(decode_pb2.DecodeEvent(step=decode_pb2.Step(sequences=sequences)))

    def _report_first(self, item: DecodeRequest, message: types_pb2.SequenceTokens) -> None:
        """Adds what is reported once, with the first tokens: how the prompt was computed or handed over."""
        item.reported, item.reported_at = True, time.perf_counter()
        if not item.prefill_here:
            message.first_decode_step_ms = (item.reported_at - item.joined_at) * 1e3
            return
        item.joined_at = item.reported_at
        if item.scheduled is not None:
            num_cached, computing_s = item.scheduled.num_cached_tokens, item.reported_at - item.scheduled.at
            message.num_cached_tokens = num_cached
            message.num_fetched_tokens = min(item.fetch.num_tokens, num_cached)
            message.num_peer_tokens = min(item.fetch.num_peer_tokens, message.num_fetched_tokens)
            message.prefix_fetch_ms = item.fetch.waited_ms
            message.prefill_queue_ms = (item.scheduled.at - item.queued_at) * 1e3
            message.prefill_compute_ms = computing_s * 1e3
            if not item.fetch.num_tokens:
                self.connector.fetches.policy.note_compute(item.num_tokens - num_cached, computing_s)
            item.fetch.stop()

    def _forget(self, sequence_id: str, error: TandemError | None = None) -> DecodeRequest | None:
        item = self._requests.pop(sequence_id, None)
        if item is not None:
            item.fetch.stop()
            item.end_trace(error)
        if not self._requests:
            self.idle.set()
        return item

    def _send_failed(self, item: DecodeRequest, error: TandemError) -> None:
        item.log.log(failure_level(error), "request %s failed: %s", item.request_id, error)
        item.end_trace(error)
        failed = types_pb2.Failed(request_id=item.request_id, error=to_proto(error))
        item.session.send(decode_pb2.DecodeEvent(failed=failed))
