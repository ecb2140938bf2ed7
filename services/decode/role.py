"""The decode role: Reserve → receives posted → join → tokens, all of a router's sequences in one message a step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from services.decode.reservation import Arrival, DecodeRequest, Reservation, joined
from services.worker.role import SENDER_TIMEOUT_S, TakeCommand
from services.worker.session import Session
from services.worker.worker import Worker
from shared.engine.messages import (
    AbortSequence,
    Event,
    JoinSequence,
    NewToken,
    ReserveSequence,
    SequenceFailed,
    SequenceReserved,
    StepOutput,
)
from shared.engine.sequence import Goal
from shared.errors import Internal, ModelMismatch, TandemError, TransferFailed, WorkerLost
from shared.kv.block_memory import BlockMemory
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.handoff.receive_handoff import HandoffReceiver, LostMemory, MemoryLost
from shared.kv.handoff.stall import REPORT_EVERY_S
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.telemetry.logs import failure_level

logger = logging.getLogger(__name__)

SIGN_EVERY_S = 30.0
"""A router hears so often that a prompt which is computed here is not forgotten: it may take many minutes."""


class DecodeRole:
    """Implements `Role`. A reserved sequence's blocks are freed only when no receive can write to them any more."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._host = worker.host
        self.requests: dict[str, DecodeRequest] = {}
        self._lost = LostMemory()
        self._looking: asyncio.TimerHandle | None = None  # while any hand-off is under way
        self._signing: asyncio.TimerHandle | None = None  # while any prompt is computed here
        self._arrival_check = ArrivalCheck(worker.host.model.layout.block_bytes, worker.host.packing)
        self.commands: Mapping[str, TakeCommand] = {
            "reserve": self._reserve,
            "reassign": self._reassign,
            "cancel": self._cancel,
            "peer_lost": self._peer_lost,
        }

    @property
    def held(self) -> Collection[str]:
        """See Role."""
        return self.requests.keys()

    # --- commands

    def _peer_lost(self, session: Session, lost: types_pb2.PeerLost) -> None:
        """The trailers of this worker, which cancelled requests wait for, will not come."""
        for item in list(self.requests.values()):
            waits_for = item.reservation.sender if item.reservation is not None and item.reservation.cancelled else ""
            if item.session is session and waits_for == lost.name and item.receiving is not None:
                item.receiving.cancel()

    def _reassign(self, session: Session, reassign: worker_pb2.Reassign) -> None:
        """Raises WorkerLost where the reservation cannot be served any more; the router then begins anew."""
        sequence_id = session.key(reassign.request_id)
        item = self.requests.get(sequence_id)
        if item is None or (item.reservation is None and item.first_token is None):
            raise WorkerLost(f"request {reassign.request_id!r} has no reservation here")
        item.log.debug("request %s: its prefill worker %s is lost", item.request_id, reassign.lost)
        if item.reservation is not None:
            item.reservation.reassign(reassign.first_token if reassign.HasField("first_token") else None)
        elif item.first_token is not None:  # it joined before this came
            item.session.send(reserved=joined(item.request_id, item.first_token))

    def _reserve(self, session: Session, reserve: worker_pb2.Reserve) -> None:
        form = self._host.model.layout.format
        if reserve.prefill_here and form.source:
            raise ModelMismatch(f"a decode worker with KV in {form.name} computes no prompts", field="prefill_here")
        sequence_id, log, trace = self._worker.begin(session, reserve)
        log.debug("request %s: blocks for %d tokens to reserve", reserve.request_id, len(reserve.token_ids))
        item = DecodeRequest(
            session,
            reserve.request_id,
            len(reserve.token_ids),
            reserve.tenant,
            log,
            trace,
            prefill_here=reserve.prefill_here,
        )
        try:
            sequence = self._worker.build_sequence(sequence_id, reserve, Goal.COMPLETION)
            item.adapter = self._worker.router_adapters.hold(reserve.adapter)
        except TandemError as error:
            self._send_failed(item, error)
            return
        self.requests[sequence_id] = item
        self._worker.note_idle()
        if reserve.prefill_here:
            self._sign_later()
            self._worker.compute(sequence, item, reserve, self)
        else:
            self._host.engine.submit(ReserveSequence(sequence))

    def _cancel(self, session: Session, cancel: types_pb2.Cancel) -> None:
        self._end(session.key(cancel.request_id), sender_active=cancel.peer_active, sender=cancel.peer)

    def abandon(self, sequence_id: str) -> None:
        """See Role. Without its router the worker cannot know whether a prefill worker sends, or ever got the ticket:
        it does not wait for a trailer. What still comes for the ticket is dropped."""
        self._end(sequence_id, sender_active=False)

    def fail(self, sequence_id: str, error: TandemError) -> None:
        """See Role. One that is cancelled ends without an error."""
        item = self.requests[sequence_id]
        if item.reservation is None or not item.reservation.cancelled:
            self.abandon(sequence_id)
            self._send_failed(item, error)

    def _end(self, sequence_id: str, *, sender_active: bool, sender: str = "") -> None:
        item = self.requests.get(sequence_id)
        if item is None:
            return
        item.log.debug("request %s is cancelled", item.request_id)
        if item.receiving is None or item.reservation is None:
            # Running, waiting or not reserved yet: the engine alone holds it.
            self._forget(sequence_id)
            self._host.engine.submit(AbortSequence(sequence_id))
        else:
            item.reservation.cancelled, item.reservation.sender = True, sender or item.reservation.sender
            if not sender_active or item.reservation.ended_by_cancel:
                item.receiving.cancel()

    # --- engine events

    def on_event(self, event: Event) -> None:
        """See Role."""
        match event:
            case SequenceReserved():
                self._on_reserved(event)
            case SequenceFailed(sequence_id, error):
                item = self._forget(sequence_id, error)
                if item is not None:
                    self._send_failed(item, error)
            case StepOutput(tokens, _, started):
                for first in started:
                    if (item := self.requests.get(first.sequence_id)) is not None:
                        item.scheduled(first)
                self._on_tokens(tokens)

    def _on_reserved(self, reserved: SequenceReserved) -> None:
        item = self.requests.get(reserved.sequence_id)
        if item is None:
            return  # cancelled meanwhile: its AbortSequence is queued behind the reservation
        places = dict(reserved.needed)  # block ids by index
        try:
            memory = self._host.engine.blocks.incoming(list(places.values()))
        except TransferFailed as error:
            self._forget(reserved.sequence_id, error)
            self._host.engine.submit(AbortSequence(reserved.sequence_id))
            self._send_failed(item, error)
            return
        buffers = list(zip(places.values(), memory, strict=True))
        arriving = dict(zip(places, memory, strict=True))

        def store(indexes: Sequence[int]) -> None:
            self._host.engine.blocks.store([(places[index], arriving[index]) for index in indexes])

        reserve_ms = (time.perf_counter() - item.queued_at) * 1e3

        def answer(reserved: worker_pb2.Reserved) -> None:
            reserved.reserve_ms = reserve_ms
            item.session.send(reserved=reserved)

        item.reservation = reservation = Reservation(
            item.request_id,
            reserved.num_cached_tokens,
            HandoffReceiver(
                self._host.transfer,
                self._arrival_check,
                arriving,
                item.num_tokens,
                self._host.fleet_key,
                store if self._host.engine.blocks.waits_for_copies else None,
            ),
            answer,
            SENDER_TIMEOUT_S,
        )
        item.reserved_at = time.perf_counter()
        item.receiving = asyncio.create_task(self._receive(reserved.sequence_id, item, reservation, buffers))
        # Not the task's own last lines: a task that is cancelled before its first step never runs one.
        item.receiving.add_done_callback(
            lambda task: self._on_received(task, reserved.sequence_id, item, reservation, buffers)
        )
        self._look_later()

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._look)

    def _look(self) -> None:
        """Reports each hand-off of which nothing has arrived since the last look: its sender may have sent something.
        One timer for all of them."""
        self._looking = None
        for item in self.requests.values():
            if item.receiving is None or item.reservation is None:
                continue
            self._look_later()
            num_arrived = item.reservation.look()
            if item.reservation.is_deserted:
                item.receiving.cancel()
            elif num_arrived is not None and not item.reservation.cancelled:
                item.session.send(arrivals=worker_pb2.Arrivals(request_id=item.request_id, num_arrived=num_arrived))

    def _sign_later(self) -> None:
        if self._signing is None:
            self._signing = asyncio.get_running_loop().call_later(SIGN_EVERY_S, self._sign)

    def _sign(self) -> None:
        self._signing = None
        for item in self.requests.values():
            if item.prefill_here and not item.reported:
                self._sign_later()
                item.session.send(arrivals=worker_pb2.Arrivals(request_id=item.request_id))

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
        reservation: Reservation,
        buffers: list[tuple[int, BlockMemory]],
    ) -> None:
        """Ends the receiving of one sequence: it joins the batch, or its blocks are freed."""
        arrived, is_lost = (None, False) if task.cancelled() else task.result()
        item.receiving = item.reservation = None
        if arrived is not None and (arrived.finished or not reservation.cancelled):
            self._on_arrival(sequence_id, item, arrived, reservation.receiver, buffers)
        else:
            arrived = None
            if not is_lost:
                self._host.engine.submit(AbortSequence(sequence_id))
        if arrived is None or arrived.finished:
            self._forget(sequence_id)

    def _on_arrival(
        self,
        sequence_id: str,
        item: DecodeRequest,
        arrived: Arrival,
        receiver: HandoffReceiver,
        buffers: list[tuple[int, BlockMemory]],
    ) -> None:
        if receiver.num_damaged:
            item.log.warning("request %s: %d blocks arrived damaged", item.request_id, receiver.num_damaged)
        if not self._host.engine.blocks.waits_for_copies:  # else they are in the pool since each was checked
            self._host.engine.blocks.store(buffers)
        item.joined_at = time.perf_counter()
        item.first_token = arrived.first_token
        join = JoinSequence(
            sequence_id,
            arrived.first_token,
            receiver.checksums,
            frozenset(receiver.damaged),
            receiver.num_damaged,
        )
        if arrived.finished or item.has_adapter:
            self._join(item, join)
        else:
            item.joining = asyncio.create_task(self._join_with_adapter(item, join))

    def _join(self, item: DecodeRequest, join: JoinSequence) -> None:
        slot = 0 if item.adapter is None else item.adapter.slot
        self._host.engine.submit(replace(join, adapter=slot) if slot else join)

    async def _join_with_adapter(self, item: DecodeRequest, join: JoinSequence) -> None:
        """The blocks are here, the adapter is still to come."""
        assert item.adapter is not None
        try:
            await item.adapter.ready()
        except TandemError as error:
            if self.requests.get(join.sequence_id) is item:
                self.fail(join.sequence_id, error)
            return
        if self.requests.get(join.sequence_id) is item:
            self._join(item, join)

    def _free_lost(self, sequence_id: str, buffers: Sequence[tuple[int, BlockMemory]]) -> None:
        """Their silent sender cannot write to them any more."""
        logger.warning("%d blocks of sequence %s are safe again, and free", len(buffers), sequence_id)
        self._host.engine.submit(AbortSequence(sequence_id))

    def _on_tokens(self, tokens: tuple[NewToken, ...]) -> None:
        """One Step message for each router that has sequences in this engine step."""
        steps: dict[Session, worker_pb2.Events] = {}
        for token in tokens:
            item = self.requests.get(token.sequence_id)
            if item is None:
                continue  # another role's, or cancelled while the step ran
            envelope = steps.get(item.session)
            if envelope is None:
                envelope = steps[item.session] = worker_pb2.Events()
                envelope.events.add()
            messages = envelope.events[0].step.sequences
            # Tokens of one sequence, which guessing brings, follow each other.
            is_next = len(messages) > 0 and messages[-1].request_id == item.request_id
            message = messages[-1] if is_next else messages.add()
            item.write_token(message, token)
            if not item.reported:
                self._report_first(item, message)
            if token.finish_reason is not None:
                message.decode_ms = (time.perf_counter() - item.joined_at) * 1e3
                message.preempted_ms = token.preempted_s * 1e3
                item.log.debug("request %s is finished", item.request_id)
                self._forget(token.sequence_id)
        for session, envelope in steps.items():
            session.put(envelope.SerializeToString())

    def _report_first(self, item: DecodeRequest, message: types_pb2.SequenceTokens) -> None:
        """Adds what is reported once, with the first tokens: how the prompt was computed or handed over."""
        item.reported, item.reported_at = True, time.perf_counter()
        if not item.prefill_here:
            message.first_decode_step_ms = (item.reported_at - item.joined_at) * 1e3
            return
        item.joined_at = item.reported_at
        if item.scheduled_at:
            self._worker.report_prompt(item, message, item.reported_at - item.scheduled_at)

    def _forget(self, sequence_id: str, error: TandemError | None = None) -> DecodeRequest | None:
        item = self.requests.pop(sequence_id, None)
        if item is not None:
            item.fetch.stop()
            item.end_trace(error)
            item.release_adapter()
        self._worker.note_idle()
        return item

    def _send_failed(self, item: DecodeRequest, error: TandemError) -> None:
        item.log.log(failure_level(error), "request %s failed: %s", item.request_id, error)
        item.end_trace(error)
        item.session.send(failed=types_pb2.Failed(request_id=item.request_id, error=to_proto(error)))
