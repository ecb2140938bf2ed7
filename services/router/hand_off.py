"""One attempt at a request: the router's conversation with a decode worker and a prefill worker."""

from __future__ import annotations

import asyncio
import time

from services.router.active_request import ActiveRequest, Assignment
from services.router.decode_link import DecodeLink
from services.router.placement.prediction import TtftPredictor
from services.router.prefill_link import PrefillLink
from services.router.worker_link import Message
from shared.errors import TandemError, WorkerLost
from shared.rpc.convert import sampling_to_proto
from shared.rpc.pb.tandem.v1 import decode_pb2, prefill_pb2, types_pb2


class HandOff:
    """One attempt: the conversation with a decode worker and, unless it prefills itself, a prefill worker."""

    def __init__(
        self, active: ActiveRequest, assignment: Assignment, predictor: TtftPredictor, worker_timeout_s: float
    ) -> None:
        """`predictor` learns from what the workers say of their prefill times."""
        self._active = active
        self._request = active.request
        self._decode = assignment.decode
        self._prefill = assignment.prefill
        self._predictor = predictor
        self._placed_at = time.perf_counter()
        self._num_tokens = active.num_tokens
        self._num_ahead = assignment.num_tokens_ahead
        self._timeout_s = worker_timeout_s
        self._submitted = False
        self._first_here = False  # this attempt's first token has come
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._silence = self._loop.call_at(self._heard_at + worker_timeout_s, self._check_silence)

    async def run(self) -> None:
        """Returns when the request ended; raises the TandemError that ended the attempt."""
        self._reserve()
        if self._prefill is not None:
            reserved = await self._next()
            while not isinstance(reserved, decode_pb2.Reserved):
                reserved = await self._next()
            self._active.timeline.reserved = time.perf_counter()
            self._submit(self._prefill, self._decode, reserved)
        else:
            self._active.timeline.reserved = self._active.timeline.placed
        early: list[types_pb2.SequenceTokens] = []  # steps that overtook the first token
        while not self._active.finished:
            message = await self._next()
            if isinstance(message, prefill_pb2.FirstToken):
                self._tokens(message.tokens)
                for tokens in early:
                    self._tokens(tokens)
            elif isinstance(message, types_pb2.SequenceTokens):
                if self._prefill is not None and not self._first_here:
                    early.append(message)
                else:
                    self._tokens(message)

    def release(self) -> None:
        """Tells the workers, by message, that the request is over for them."""
        self._silence.cancel()
        request_id = self._active.wire_id
        ended = self._active.finished
        sender_active = self._submitted and self._prefill is not None and self._prefill.connected
        if self._prefill is not None:
            self._prefill.close(request_id)
            if self._submitted and not ended:
                self._prefill.cancel(request_id, receiver_active=self._decode.connected)
        self._decode.close(request_id)
        if not ended:
            self._decode.cancel(request_id, sender_active=sender_active)

    def _reserve(self) -> None:
        request = self._request
        self._decode.reserve(
            decode_pb2.Reserve(
                request_id=self._active.wire_id,
                token_ids=self._active.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=sampling_to_proto(request.sampling),
                salt=request.tenant,
                prefill_here=self._prefill is None,
                trace=request.trace,
                num_stored_blocks=self._active.hits.num_stored_blocks,
            )
        )
        self._active.summary.decode_worker = self._decode.name
        self._active.summary.prefill_worker = self._prefill.name if self._prefill is not None else ""

    def _submit(self, prefill: PrefillLink, decode: DecodeLink, reserved: decode_pb2.Reserved) -> None:
        if decode.welcome is None:
            raise WorkerLost(f"worker {decode.name} was lost")
        request = self._request
        prefill.submit(
            prefill_pb2.Submit(
                request_id=self._active.wire_id,
                token_ids=self._active.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=sampling_to_proto(request.sampling),
                salt=request.tenant,
                ticket=reserved.ticket,
                transfer_address=decode.welcome.transfer_address,
                needed_blocks=reserved.needed_blocks,
                trace=request.trace,
                num_stored_blocks=self._active.hits.num_stored_blocks,
            )
        )
        self._submitted = True

    async def _next(self) -> Message:
        """The next message about this attempt; raises what a worker said went wrong."""
        message = await self._active.inbox.get()
        self._heard_at = self._loop.time()
        if isinstance(message, TandemError):
            raise message
        return message

    def _check_silence(self) -> None:
        """One timer an attempt: a timeout around every message would cost as much as passing it on."""
        due = self._heard_at + self._timeout_s
        if self._loop.time() < due:
            self._silence = self._loop.call_at(due, self._check_silence)
        else:
            silent = WorkerLost(f"nothing heard of the request for {self._timeout_s:g} s", limit=self._timeout_s)
            self._active.inbox.put_nowait(silent)

    def _tokens(self, tokens: types_pb2.SequenceTokens) -> None:
        now = time.perf_counter()
        if not self._first_here:
            self._first_token_came(tokens, now)
            if not self._active.produced:
                self._active.on_first_token(tokens, now)
        elif len(self._active.produced) == 1 and self._prefill is not None:
            self._active.on_second_token(tokens, now)
        self._active.emit(tokens)

    def _first_token_came(self, tokens: types_pb2.SequenceTokens, now: float) -> None:
        """The prompt is no longer queued on the worker that computed it, and what it cost is known."""
        self._first_here = True
        (self._prefill or self._decode).computed(self._active.wire_id)
        on_worker_s = (tokens.prefill_queue_ms + tokens.prefill_compute_ms) / 1e3
        if on_worker_s <= 0:
            return
        num_cached = min(tokens.num_cached_tokens, self._num_tokens - 1)
        if self._prefill is None:
            self._predictor.observe_here(self._num_ahead, self._num_tokens - num_cached, num_cached, on_worker_s)
        else:
            self._predictor.observe_prefill(self._num_ahead, self._num_tokens - num_cached, num_cached, on_worker_s)
            self._predictor.observe_hand_off(max(0.0, now - self._placed_at - on_worker_s))
