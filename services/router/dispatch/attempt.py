"""One attempt at a request: the router's conversation with a decode worker and a prefill worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.answer_move import PREPARING, AnswerMove, Seat
from services.router.dispatch.record import RequestEvent, RequestState
from services.router.dispatch.transitions import (
    ASKED_AGAIN,
    AWAITS_FIRST_TOKEN,
    HAS_FIRST_TOKEN,
    HELD,
    HOLDERS,
    UNSUBMITTED,
    Holder,
)
from services.router.dispatch.worker_commands import AttemptCommands
from services.router.placement.cut_pairs import CutPairs
from services.router.placement.moves import MoveCause
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import NO_WORK, Work
from services.router.workers.link import Message, WorkerLink
from shared.errors import PeerUnreachable, TandemError, TransferFailed, WorkerDied, WorkerLost
from shared.fingerprints import weights_digest
from shared.kv.groups import KVGroups
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

Successor = tuple[WorkerLink, Work]
"""Another prefill worker for the same reservation, and what it has to compute."""

ChooseSuccessor = Callable[[ActiveRequest, str, str, TandemError, bool], Successor | None]
"""By (request, name of the decode worker, name of the lost prefill worker, the loss, whether it held the request)."""

_DECODING = RequestState.DECODING  # looked at for each token: reading a member of an enum takes 0.1 µs
_FINISHED = RequestState.FINISHED


class Attempt:
    """One attempt: the conversation with a decode worker and, unless it prefills itself, a prefill worker.

    The links call `receive` with their workers' messages, and everything that follows is done in that call:
    a token passes through here without waking a task. `run` wakes once, when the attempt is over. Each message moves
    the request through the table of `transitions.py`; from the decode worker's first tokens on the prefill worker is
    out, and its end no longer matters. A prefill worker that is lost before is replaced where that is possible: the
    decode worker keeps its reservation, and the next one sends what is missing, under a name of its own. A running
    answer may move to another decode worker, which is the attempt's then (`answer_move.py`).
    """

    def __init__(
        self,
        active: ActiveRequest,
        decode: WorkerLink,
        prefill: WorkerLink | None,
        predictor: TtftPredictor,
        worker_timeout_s: float,
        choose_successor: ChooseSuccessor,
        heard: Callable[[], Coroutine[Any, Any, None]],
        pairs: CutPairs,
    ) -> None:
        """From now on it listens to both workers. `predictor` learns from the prefill times that they report. `heard`
        returns once it is known which workers died together. `pairs` learns which workers reach each other."""
        self._active = active
        self._request = active.request
        self._first_seat = Seat(decode, active.wire_id)
        self._move: AnswerMove | None = None  # the latest
        self._prefill = prefill
        self._computing: WorkerLink = prefill or decode
        self._fingerprint = decode.welcome.model_fingerprint if decode.welcome is not None else ""
        self._commands = AttemptCommands(active, weights_digest(self._fingerprint) if self._fingerprint else 0)
        self._token_ids: Iterable[int] = active.token_ids
        self._predictor = predictor
        self._placed_at = time.perf_counter()
        self._num_tokens = active.num_tokens
        self._ahead = self._computing.queued  # before it, where it is computed
        self._tier = self._computing.tier_of(active.request.adapter)
        self._timeout_s = worker_timeout_s
        self._choose_successor = choose_successor
        self._num_senders = 1  # prefill workers so far
        self._sender_id = active.wire_id  # the request's name there
        self._reserved: worker_pb2.Reserved | None = None  # the decode worker's answer to the newest question
        self._heard = heard
        self._pairs = pairs
        self._hearing: asyncio.Task[None] | None = None  # ends the states `HELD`
        self._early: list[types_pb2.SequenceTokens] = []  # steps that overtook the first token
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._error: Exception | None = None
        self.suspects: frozenset[str] = frozenset()
        """Once it failed: the workers that may be the cause, by name."""
        self.is_charged = False
        """Once it failed: the cause is the loss of a prefill worker, which the request was charged with then."""
        self.died = ""
        """Once it failed: the worker whose process ended with the request on it; empty where none did."""
        self._heard_at = self._loop.time()
        self._silence = self._loop.call_at(self._heard_at + worker_timeout_s, self._check_silence)

    @property
    def _seat(self) -> Seat:
        return self._move.seat if self._move is not None else self._first_seat

    @property
    def decode(self) -> WorkerLink:
        """The worker that writes the answer."""
        move = self._move
        return self._first_seat.link if move is None else move.seat.link

    def open(self, work: Work, num_blocks: int) -> None:
        """Commits to the workers in our view: `work` for the one that computes, `num_blocks` more blocks to hold."""
        wire_id, decode, prefill = self._active.wire_id, self.decode, self._prefill
        decode.open(
            wire_id,
            partial(self.receive, decode),
            work if prefill is None else NO_WORK,
            num_blocks=num_blocks,
            num_answer_tokens=self._num_tokens,
        )
        if prefill is not None:
            prefill.open(self._sender_id, partial(self.receive, prefill), work, num_blocks=0)

    async def run(self) -> None:
        """Returns when the request ended; raises what ended the attempt, a TandemError unless it is a bug."""
        self._reserve()
        await self._over
        if self._error is not None:
            raise self._error

    def receive(self, worker: WorkerLink, message: Message | TandemError, *, is_silence: bool = False) -> None:
        """Takes a worker's message about the attempt; what comes after the end is dropped. `is_silence`: it is no
        message but that none came."""
        if self._over.done():
            return
        self._heard_at = self._loop.time()
        try:
            self._on_message(worker, message)
        except Exception as error:
            self._error = error
            # What is wrong with the reservation after the loss is no fault of the decode worker, while it answers.
            is_asked_again = self._active.state in ASKED_AGAIN and not is_silence
            self.is_charged = is_asked_again and worker is self.decode and worker.connected
            self.suspects = frozenset() if self.is_charged else self._suspected(worker, error)
            holder = Holder.DECODE if worker is self.decode else Holder.PREFILL
            if isinstance(error, WorkerDied) and holder in HOLDERS[self._active.state]:
                self.died = worker.name
        if self._active.state is _FINISHED or self._error is not None:
            self._over.set_result(None)

    def move(self, target: WorkerLink, cause: MoveCause, groups: KVGroups) -> None:
        """Moves the answer, which decodes and stays so where the move fails, to another decode worker."""
        self._prefill = None  # it has been out since the decode worker joined
        self._move = AnswerMove(self._active, self._seat, target, groups, self._commands, self.receive)
        self._move.begin(cause)

    def refuse(self) -> None:
        """The worker that raised Overloaded was fuller than our view of it: no new work there until it reports."""
        for link in (self.decode, self._prefill):
            if link is not None and link.name in self.suspects:
                link.refused()

    def release(self) -> None:
        """Sends the end of the attempt to the workers that still hold memory for the request."""
        self._silence.cancel()
        self._over.cancel()
        if self._hearing is not None:
            self._hearing.cancel()
        if self._move is not None:
            self._move.end()
        prefill = self._prefill
        holders = HOLDERS[self._active.state]
        sending = prefill is not None and Holder.PREFILL in holders and prefill.connected
        sending = sending and not isinstance(self._error, PeerUnreachable)  # else no trailer comes
        if prefill is not None:
            prefill.close(self._sender_id)
            if sending:
                prefill.cancel(self._sender_id, peer=self.decode.name if self.decode.connected else "")
        self.decode.close(self._seat.name)
        if Holder.DECODE in holders:
            self.decode.cancel(self._seat.name, peer=prefill.name if sending and prefill is not None else "")

    def _reserve(self) -> None:
        decode, is_alone = self.decode, self._prefill is None
        self._active.move(RequestEvent.PLACED, decode.name)
        command = self._commands.reserve(decode.name, prefill_here=is_alone)
        self._token_ids = decode.reserve(command, self._token_ids)
        if is_alone:  # the same message is both
            self._active.move(RequestEvent.SUBMITTED, decode.name)
            self._token_ids = ()

    def _submit(self, prefill: WorkerLink, decode: WorkerLink, reserved: worker_pb2.Reserved) -> None:
        if decode.welcome is None:
            raise WorkerLost(f"worker {decode.name} was lost")
        token_ids = self._token_ids if self._num_senders == 1 else self._active.token_ids[: self._num_tokens]
        command = self._commands.submit(self._sender_id, prefill.name, decode.welcome.transfer_address, reserved)
        prefill.submit(command, token_ids)
        self._active.move(RequestEvent.SUBMITTED, prefill.name)
        self._token_ids = ()  # else the messages' memory would stay until the end

    def _on_message(self, worker: WorkerLink, message: Message | TandemError) -> None:
        """Raises the error that a worker reported, unless another worker can take over from it."""
        if isinstance(message, types_pb2.SequenceTokens):
            if self._active.state is _DECODING:
                self._active.emit(message)
            else:
                self._on_step(worker, message)
        elif isinstance(message, worker_pb2.FirstToken):
            if self._num_senders > 1 and self._active.state is RequestState.SHIPPING:
                self._computing.computed(self._sender_id)  # the client has the first sender's
            else:
                self._on_prefilled(message.tokens)
        elif isinstance(message, worker_pb2.Reserved):
            if self._prefill is not None and self._active.state in UNSUBMITTED:
                self._on_reserved(self._prefill, message)
        elif isinstance(message, worker_pb2.Arrivals):
            self._pass_on(message)
        elif isinstance(message, TandemError) and not (
            self._outlived(worker, message) or self._succeeded(worker, message)
        ):
            raise message

    def _outlived(self, worker: WorkerLink, error: TandemError) -> bool:
        """Whether the answer continues in spite of the error, since two workers had it."""
        move, active = self._move, self._active
        if move is None or active.state not in PREPARING or not (error.retryable or worker is not self.decode):
            return False
        if isinstance(error, WorkerDied):
            active.deaths.note(active.request.request_id, worker.name, len(active.produced))
            self._hear_soon()
        if worker is self.decode:
            active.charge((worker.name,))
            move.left_alone(error)
        else:
            move.stay(error)
        return True

    def _pass_on(self, arrivals: worker_pb2.Arrivals) -> None:
        """The decode worker waits; the prefill worker knows whether for something that it has sent."""
        prefill, welcome = self._prefill, self.decode.welcome
        if prefill is None or welcome is None or not prefill.connected:
            return
        if Holder.PREFILL in HOLDERS[self._active.state]:
            arrivals.request_id, arrivals.transfer_address = self._sender_id, welcome.transfer_address
            prefill.send(arrivals=arrivals)

    def _on_prefilled(self, tokens: types_pb2.SequenceTokens) -> None:
        """The first token, and then the steps that overtook it."""
        self._active.check_prompt_logprobs(tokens, self._computing.name)
        self._active.move(RequestEvent.FIRST_TOKEN)
        self._on_first_token(tokens)
        early, self._early = self._early, []
        for step in early:
            self._on_step(self.decode, step)

    def _on_reserved(self, prefill: WorkerLink, reserved: worker_pb2.Reserved) -> None:
        """What the decode worker needs, of the first prefill worker or of the next."""
        self._reserved = reserved
        if not reserved.joined:
            if self._num_senders == 1:
                self._active.record.reserve_on_worker_ms = reserved.reserve_ms
            if self._active.state not in HELD:
                self._submit(prefill, self.decode, reserved)
            return
        prefill.close(self._sender_id)  # everything had arrived before the loss
        if self._active.state in AWAITS_FIRST_TOKEN:
            sampling = self._request.sampling
            if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
                raise WorkerLost("the prefill worker was lost with the first token's log-probabilities")
            self._on_prefilled(
                types_pb2.SequenceTokens(request_id=self._active.wire_id, token_ids=[reserved.first_token])
            )

    def _succeeded(self, worker: WorkerLink, error: TandemError) -> bool:
        """Whether another prefill worker takes the place of one that was lost before the hand-over, or that does not
        reach the decode worker."""
        state, lost = self._active.state, self._prefill
        is_waiting = state in UNSUBMITTED
        if lost is None or worker is not lost or not self.decode.connected:
            return False
        if isinstance(error, PeerUnreachable):
            self._pairs.note_cut(lost.name, self.decode.name, time.perf_counter())
        elif lost.connected:
            return False
        if not (is_waiting or (self._reserved is not None and self._reserved.reassignable)):
            return False
        held = Holder.PREFILL in HOLDERS[state]
        successor = self._choose_successor(self._active, self.decode.name, lost.name, error, held)
        if successor is None:
            return False
        lost.close(self._sender_id)
        self._num_senders += 1
        self._sender_id = f"{self._active.wire_id}.{self._num_senders}"
        self._prefill, work = successor
        self._computing, self._ahead = self._prefill, self._prefill.queued
        self._tier = self._computing.tier_of(self._active.request.adapter)
        self._prefill.open(self._sender_id, partial(self.receive, self._prefill), work, num_blocks=0)
        self._active.move(RequestEvent.SENDER_LOST, self._prefill.name, error)
        if not is_waiting:
            self._reassign(lost.name)
        if held and isinstance(error, WorkerDied):
            self._active.move(RequestEvent.HELD)
            self._hear_soon()
        return True

    def _hear_soon(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        self._hearing = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        """The next sender may have died with the lost one: nothing is submitted to it before it was heard from, else it
        would seem that the request was present at both deaths."""
        await self._heard()
        self._active.deaths.all_known()
        if self._active.state in HELD:
            self._active.move(RequestEvent.ALL_HEARD)
            if self._reserved is not None:
                self.receive(self.decode, self._reserved)

    def _reassign(self, lost: str) -> None:
        """Another prefill worker is to serve the reservation; the decode worker answers with a Reserved."""
        reassign = worker_pb2.Reassign(request_id=self._active.wire_id, lost=lost)
        if self._active.state is RequestState.RESUMING:
            reassign.first_token = self._active.produced[-1] if self._active.produced else 0  # of a beam search
        self._reserved = None
        self.decode.send(reassign=reassign)

    def _on_step(self, worker: WorkerLink, tokens: types_pb2.SequenceTokens) -> None:
        """Tokens from the decode worker, its first or those that overtook the first token."""
        active = self._active
        if active.state is _DECODING:
            active.emit(tokens)
        elif self._move is not None:
            self._move.take(worker, tokens)
        elif active.state in HAS_FIRST_TOKEN:
            first_token_at = active.record.entries[-1].at
            active.move(RequestEvent.JOINED)
            if self._prefill is not None:
                self._predictor.observe_gap(active.record.entries[-1].at - first_token_at)
                self._prefill.close(self._sender_id)
                self._pairs.note_works(self._prefill.name, self.decode.name)
            if active.num_output_tokens == 1:
                active.record.first_decode_step_ms = tokens.first_decode_step_ms
            active.emit(tokens)
        elif self._prefill is None:
            active.check_prompt_logprobs(tokens, self._computing.name)
            active.move(RequestEvent.JOINED)
            self._on_first_token(tokens)
        else:
            if not self._early:
                active.move(RequestEvent.OVERTOOK)
            self._early.append(tokens)

    def _suspected(self, worker: WorkerLink, error: Exception) -> frozenset[str]:
        """The workers that may have caused an error that `worker` reported: for a transfer, either side."""
        if isinstance(error, TransferFailed) and self._prefill is not None and self._active.state not in UNSUBMITTED:
            return frozenset((self.decode.name, self._prefill.name))
        return frozenset((worker.name,))

    def _check_silence(self) -> None:
        """One timer an attempt: a timeout around every message would cost as much as passing it on."""
        due = self._heard_at + self._timeout_s
        if self._loop.time() < due:
            self._silence = self._loop.call_at(due, self._check_silence)
        else:
            is_computing = self._active.state in (RequestState.PREFILLING, RequestState.OVERTAKEN)
            silent = self._computing if is_computing else self.decode
            error = WorkerLost(f"nothing heard of the request for {self._timeout_s:g} s", limit=self._timeout_s)
            self.receive(silent, error, is_silence=True)

    def _on_first_token(self, tokens: types_pb2.SequenceTokens) -> None:
        """This attempt's first token: the prompt is no longer queued where it was computed, and its cost is known."""
        active, now = self._active, time.perf_counter()
        self._computing.computed(self._sender_id)
        if self._fingerprint and self._fingerprint not in active.record.weights:
            active.record.weights.append(self._fingerprint)
        if self._num_senders == 1:
            self._predictor.ttft.observe(active.record.choices[-1].predicted_ttft_s or 0.0, now - self._placed_at)
            self._learn(tokens, now)
        if not active.num_output_tokens:
            active.on_first_token(tokens)
        active.emit(tokens)

    def _learn(self, tokens: types_pb2.SequenceTokens, now: float) -> None:
        on_worker_s = (tokens.prefill_queue_ms + tokens.prefill_compute_ms) / 1e3
        if on_worker_s <= 0:
            return
        num_cached = min(tokens.num_cached_tokens, self._num_tokens - 1)
        own = Work.of(self._num_tokens - num_cached, num_cached)
        if tokens.adapter_ms > 0:
            self._predictor.observe_adapter(tokens.adapter_ms / 1e3, self._tier)
        if self._prefill is None:
            self._predictor.observe_here(self._ahead, own, on_worker_s)
        else:
            self._predictor.observe_prefill(self._ahead, own, on_worker_s)
            self._predictor.observe_hand_off(max(0.0, now - self._placed_at - on_worker_s - tokens.adapter_ms / 1e3))
