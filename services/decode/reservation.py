"""A request in the decode role, and its reserved blocks until their KV has arrived, from one prefill worker or its
successors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.attempt import WorkerRequest
from shared.errors import TransferFailed
from shared.kv.handoff.receive_handoff import HandoffReceiver, ReceivedHandoff, SenderLeft
from shared.kv.handoff.stall import REPORT_EVERY_S
from shared.rpc.pb.tandem.v1 import worker_pb2
from shared.telemetry.tracing.span import Span

REPLACED_WITHIN_S = 10.0
"""A sender left before its trailer: the router, which misses it too, names another one or cancels within this time."""

DESERTED_S = 5.0
"""The sender of a cancelled hand-off, which has only to send its trailer, is not waited for after this silence."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A reserved sequence whose KV is here."""

    first_token: int
    finished: bool
    """The first token ended the request."""


class Reservation:
    """Tells the router by `Reserved` what is needed, of each new sender anew. For one event loop."""

    def __init__(
        self,
        request_id: str,
        num_cached_tokens: int,
        receiver: HandoffReceiver,
        answer: Callable[[worker_pb2.Reserved], None],
        timeout_s: float,
    ) -> None:
        """`answer` sends to the router. A sender has `timeout_s` seconds for each message."""
        self.receiver = receiver
        self.cancelled = False
        """The router gave it up, but the sender's trailer is still to come."""
        self.sender = ""
        """Once cancelled: the prefill worker whose trailer that is."""
        self._request_id = request_id
        self._num_cached_tokens = num_cached_tokens
        self._answer = answer
        self._timeout_s = timeout_s
        self._first_token: int | None = None
        self._num_arrived = -1  # of this ticket, when it was looked at last
        self._num_silent = 0  # looks since anything arrived

    def look(self) -> int | None:
        """How many of the ticket's messages have arrived, where more are to come and none did since the last look; else
        None. To be called every REPORT_EVERY_S."""
        before, self._num_arrived = self._num_arrived, self.receiver.num_arrived
        is_silent = self._num_arrived == before and self.receiver.is_waiting
        self._num_silent = self._num_silent + 1 if is_silent else 0
        return self._num_arrived if is_silent else None

    @property
    def is_deserted(self) -> bool:
        """Cancelled, and nothing came of the trailer for so long that none is to be expected."""
        return self.cancelled and self._num_silent * REPORT_EVERY_S >= DESERTED_S

    @property
    def ended_by_cancel(self) -> bool:
        """Cancelled, and no trailer is to come any more."""
        return self.cancelled and self.receiver.left is not None

    def reassign(self, first_token: int | None) -> None:
        """The sender is lost: what it sends from now on is dropped. `first_token`: which the client has already."""
        self._first_token = first_token
        self.receiver.replace_sender()

    async def run(self) -> Arrival | None:
        """Returns when the KV is here; None where the hand-off was given up.

        However it ends, also by an exception or a cancel of the task, nothing can write to the blocks any more when
        it does, unless it raises MemoryLost. Raises TransferFailed.
        """
        while True:
            ticket, needed = self.receiver.open()
            self._num_arrived = -1
            packing = self.receiver.check.packing
            self._answer(
                worker_pb2.Reserved(
                    request_id=self._request_id,
                    ticket=ticket,
                    needed_blocks=sorted(needed),
                    num_cached_tokens=self._num_cached_tokens,
                    reassignable=True,
                    unpack_bytes_s=0.0 if packing is None else packing.rates.unpack_bytes_s,
                )
            )
            outcome = await self.receiver.receive(self._timeout_s)
            if isinstance(outcome, ReceivedHandoff):
                return self._complete(outcome)
            if self.cancelled:
                return None
            if outcome is not SenderLeft.REPLACED:
                await self.receiver.replaced(REPLACED_WITHIN_S)
            if self._first_token is not None and not self.receiver.missing:
                self._answer(joined(self._request_id, self._first_token))
                return Arrival(self._first_token, finished=False)

    def _complete(self, received: ReceivedHandoff) -> Arrival:
        if self._first_token is not None:  # another sender's may differ in bf16, and the client has this one
            arrival = Arrival(self._first_token, finished=False)
        else:
            arrival = Arrival(received.first_token, received.finished)
        if self.receiver.is_replaced:  # its Reassign crossed the trailer
            if arrival.finished:
                raise TransferFailed("the prefill worker was lost with the only token of the answer")
            self._answer(joined(self._request_id, arrival.first_token))
        return arrival


def joined(request_id: str, first_token: int) -> worker_pb2.Reserved:
    """Answers a Reassign for which no block is missing."""
    return worker_pb2.Reserved(request_id=request_id, joined=True, first_token=first_token)


@dataclass(slots=True, kw_only=True)
class DecodeRequest(WorkerRequest):
    """State of one request in the decode role."""

    prefill_here: bool
    queued_at: float = field(default_factory=time.perf_counter)
    reservation: Reservation | None = None
    """While blocks are received: it keeps the memory in which they arrive."""
    receiving: asyncio.Task[tuple[Arrival | None, bool]] | None = None
    """Runs the reservation, until both end."""
    joining: asyncio.Task[None] | None = None
    """Waits for its adapter, the blocks being here."""
    first_token: int | None = None
    """Set when it joined."""
    joined_at: float = 0.0
    """When its decoding began: with the join, or with the first token where the prompt was computed here."""
    reported: bool = False
    """The first tokens of the sequence were sent."""
    reserved_at: float = 0.0
    reported_at: float = 0.0

    def end_trace(self, error: Exception | None = None) -> None:
        """Its last token has left, or it ended before."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        now = time.perf_counter()
        parts: list[Span] = []
        if self.prefill_here:
            parts = trace.prompt_parts(self.fetch, self.queued_at, self.scheduled_at, self.reported_at)
        elif self.reserved_at:
            parts = [
                trace.part("reserve", trace.began, self.reserved_at),
                trace.part("receive", self.reserved_at, self.joined_at or now),
            ]
        if self.joined_at and not self.prefill_here:
            parts.append(trace.part("join", self.joined_at, self.reported_at or now))
        if self.reported_at:
            parts.append(trace.part("stream", self.reported_at, now))
        trace.record("decode", {"tandem.request_id": self.request_id}, parts, error)
