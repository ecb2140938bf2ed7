"""The prefill role: Submit → chunks → blocks shipped as they are sealed → first token → trailer."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from services.worker.attempt import WorkerRequest
from services.worker.role import HANDOFF_TIMEOUT_S, TakeCommand
from services.worker.session import Session
from services.worker.worker import Worker
from shared.engine.messages import AbortSequence, Event, NewToken, ReleaseBlocks, SequenceFailed, StepOutput
from shared.engine.sequence import Goal
from shared.errors import InvalidRequest, PeerUnreachable, TandemError
from shared.kernels.kv_conversion import BlockConversion
from shared.kv.block_memory import leaving
from shared.kv.handoff.link_rate import LinkRate
from shared.kv.handoff.shipment import Shipment
from shared.kv.handoff.stall import STALLED_S, StallWatch
from shared.kv.handoff.wire import Wire
from shared.kv.pool import OutgoingBlock
from shared.kv.seal import Purpose
from shared.kv.transfer import TICKET_BITS
from shared.kv.ucx.peer_address import PeerAddress
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.telemetry.logs import failure_level
from shared.telemetry.tracing.span import Attributes

PACKED_BYTES = 8 << 20
"""Bytes of the blocks that are packed together, while those before are on their way."""
MAX_LINKS = 1024
"""Receivers whose links are measured; the one that was sent to least recently goes first."""
NOTED_BYTES = 64 << 20
"""Bytes of the blocks that one note names: a longer step's blocks are checked while later ones travel."""
MAX_WATCHES = 1024
"""Hand-offs whose receivers wait, and that are watched; the one that reported least recently goes first."""


@dataclass(slots=True, kw_only=True)
class _Submitted(WorkerRequest):
    """A request between Submit and its trailer."""

    shipment: Shipment
    notes: bool
    """Whether the receiver takes notes of the blocks that are sent."""
    shipping_since: float = 0.0
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


class PrefillRole:
    """Implements `Role`. Every accepted Submit ends in one trailer; its router gets a first token, a failure, or (after
    a Cancel) nothing."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._host = worker.host
        layout = worker.host.model.layout
        self._noted = max(1, (NOTED_BYTES if worker.host.packing is None else PACKED_BYTES) // layout.block_bytes)
        self._links: OrderedDict[bytes, LinkRate] = OrderedDict()
        self._convert = BlockConversion(layout).convert if layout.format.sent else None
        self.requests: dict[str, _Submitted] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._shipments: dict[str, Shipment] = {}  # until the trailer left
        self._stalls: OrderedDict[str, StallWatch] = OrderedDict()  # of hand-offs whose receivers wait
        self.commands: Mapping[str, TakeCommand] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "peer_lost": self._peer_lost,
            "arrivals": self._arrivals,
        }

    @property
    def held(self) -> Collection[str]:
        """See Role."""
        return self._shipments.keys()

    # --- commands

    def _submit(self, session: Session, submit: worker_pb2.Submit) -> None:
        sequence_id, log, trace = self._worker.begin(session, submit)
        if submit.ticket >> TICKET_BITS:
            raise InvalidRequest(f"ticket has more than {TICKET_BITS} bits", field="ticket", limit=TICKET_BITS)
        shipment = Shipment(
            self._host.transfer,
            submit.transfer_address,
            submit.ticket,
            len(submit.needed_blocks),
            partial(leaving, self._host.engine.blocks),
            self._release,
            HANDOFF_TIMEOUT_S,
            self._host.seal(Purpose.HANDOFF, submit.ticket),
            self._convert,
            self._wire(submit),
        )
        log.debug("request %s: %d tokens to prefill", submit.request_id, len(submit.token_ids))
        item = _Submitted(
            session,
            submit.request_id,
            len(submit.token_ids),
            submit.tenant,
            log,
            trace,
            shipment=shipment,
            notes=submit.notes,
        )
        self.requests[sequence_id] = item
        self._shipments[sequence_id] = shipment
        self._worker.note_idle()
        needed = frozenset(submit.needed_blocks)
        try:
            sequence = self._worker.build_sequence(
                sequence_id, submit, Goal.FIRST_TOKEN, needed, submit.transfer_address
            )
            item.adapter = self._worker.router_adapters.hold(submit.adapter)
        except TandemError as error:
            self.fail(sequence_id, error)
            return
        self._worker.compute(sequence, item, submit, self)

    def _wire(self, submit: worker_pb2.Submit) -> Wire | None:
        """Packing for the receiver of a hand-off, where both sides have it."""
        packing = self._host.packing
        if packing is None or submit.unpack_bytes_s <= 0:
            return None
        link = self._links.setdefault(submit.transfer_address, LinkRate())
        self._links.move_to_end(submit.transfer_address)
        if len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        same_host = PeerAddress.host_in(submit.transfer_address) == PeerAddress.host_in(self._host.transfer.address)
        return Wire(packing, link, submit.unpack_bytes_s, self._host.settings.block_compression, same_host)

    def _cancel(self, session: Session, cancel: types_pb2.Cancel) -> None:
        sequence_id = session.key(cancel.request_id)
        shipment = self._shipments.get(sequence_id)
        if shipment is not None and not cancel.peer_active:
            shipment.drop_receiver()
        item = self.requests.get(sequence_id)
        if item is not None:
            item.log.debug("request %s is cancelled", item.request_id)
        self.abandon(sequence_id)

    def _peer_lost(self, session: Session, lost: types_pb2.PeerLost) -> None:
        """Blocks that were on their way to the worker when their request was cancelled are not taken any more."""
        if any(key.startswith(session.key("")) and key not in self.requests for key in self._shipments):
            self._host.transfer.drop_peer(lost.transfer_address)

    def _arrivals(self, session: Session, report: worker_pb2.Arrivals) -> None:
        """A decode worker waits. Where what was sent to it does not arrive, all requests for it fail with
        PeerUnreachable, and the router sends them another way."""
        sequence_id = session.key(report.request_id)
        shipment = self._shipments.get(sequence_id)
        # What is over was sent completely; the last small messages may still lie in a buffer of this host's network.
        num_sent = shipment.num_posted if shipment is not None else report.num_arrived + 1
        to_receiver = [other for other in self._shipments.values() if other.address == report.transfer_address]
        num_taken = sum(other.num_taken for other in to_receiver)
        watch = self._watch_of(sequence_id)
        if not watch.is_stalled(report.num_arrived, num_sent, num_taken, time.monotonic()):
            return
        del self._stalls[sequence_id]
        error = PeerUnreachable(
            f"nothing of what was sent to the decode worker has arrived for {STALLED_S:g} s", limit=STALLED_S
        )
        for other in to_receiver:
            other.give_up(error)
        for other_id, item in list(self.requests.items()):
            if item.shipment.address == report.transfer_address:
                self.fail(other_id, error)
        if shipment is None:
            session.send(failed=types_pb2.Failed(request_id=report.request_id, error=to_proto(error)))

    def _watch_of(self, sequence_id: str) -> StallWatch:
        """Kept until newer ones take its place: only receivers that wait for long have one."""
        watch = self._stalls.setdefault(sequence_id, StallWatch())
        self._stalls.move_to_end(sequence_id)
        if len(self._stalls) > MAX_WATCHES:
            self._stalls.popitem(last=False)
        return watch

    def abandon(self, sequence_id: str) -> None:
        """See Role. What it holds is released as soon as the sends under way are done."""
        self._end(sequence_id)

    def fail(self, sequence_id: str, error: TandemError) -> None:
        """See Role."""
        item = self.requests[sequence_id]
        item.log.log(failure_level(error), "request %s failed: %s", item.request_id, error)
        item.session.send(failed=types_pb2.Failed(request_id=item.request_id, error=to_proto(error)))
        self._end(sequence_id, error)

    def _end(self, sequence_id: str, error: Exception | None = None) -> None:
        item = self.requests.pop(sequence_id, None)
        if item is not None:
            item.end_trace(error)
            item.fetch.stop()
            self._host.engine.submit(AbortSequence(sequence_id))
            item.release_adapter()
            self._close(sequence_id, item.shipment.abort())

    # --- engine events

    def on_event(self, event: Event) -> None:
        """See Role."""
        match event:
            case SequenceFailed(sequence_id, error):
                if sequence_id in self.requests:
                    self.fail(sequence_id, error)
            case StepOutput(tokens, blocks, started):
                for first in started:
                    if (item := self.requests.get(first.sequence_id)) is not None:
                        item.scheduled(first)
                self._on_outgoing(blocks)
                for token in tokens:
                    if (item := self.requests.pop(token.sequence_id, None)) is not None:  # else cancelled meanwhile
                        item.release_adapter()
                        self._on_first_token(item, token)

    def _on_outgoing(self, blocks: Sequence[OutgoingBlock]) -> None:
        """The blocks that a step sealed, of all sequences."""
        outgoing: dict[str, list[OutgoingBlock]] = defaultdict(list)
        for block in blocks:
            outgoing[block.sequence_id].append(block)
        for sequence_id, batch in outgoing.items():
            item = self.requests.get(sequence_id)
            if item is None:  # cancelled while the step ran
                self._release(batch)
                continue
            item.shipping_since = item.shipping_since or time.perf_counter()
            if item.trace is not None:
                item.trace.chunk(len(batch))
            if item.notes:
                for begin in range(0, len(batch), self._noted):
                    item.shipment.add_noted(batch[begin : begin + self._noted])
            else:
                item.shipment.add(*batch)

    def _on_first_token(self, item: _Submitted, token: NewToken) -> None:
        item.first_token_at = time.perf_counter()
        envelope = worker_pb2.Events()
        message = envelope.events.add().first_token.tokens
        item.write_token(message, token)
        self._worker.report_prompt(item, message, item.first_token_at - item.scheduled_at)
        item.log.debug("request %s has its first token", item.request_id)
        item.session.put(envelope.SerializeToString())
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
            item.session.send(failed=types_pb2.Failed(request_id=item.request_id, error=to_proto(error)))
        now = time.perf_counter()
        self._worker.shipments.ended(now - (item.shipping_since or begun), now - begun, failed=failed)

    def _release(self, blocks: Sequence[OutgoingBlock]) -> None:
        """Gives back blocks of one sequence, and so of one receiver."""
        if blocks:
            block_ids = tuple(block.block_id for block in blocks)
            self._host.engine.submit(ReleaseBlocks(block_ids, blocks[0].receiver))

    def _close(self, sequence_id: str, ending: Coroutine[None, None, None]) -> None:
        """Runs the end of a shipment; the shipment is known until it is over."""
        task = asyncio.create_task(ending)
        self._closing.add(task)

        def closed(task: asyncio.Task[None]) -> None:
            self._closing.discard(task)
            del self._shipments[sequence_id]
            self._worker.note_idle()

        task.add_done_callback(closed)
