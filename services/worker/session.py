"""One router's session with a worker, and the requests that come through it: the state that both roles share."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from services.worker.blocks.prefix_fetch.fetch import Fetch
from services.worker.telemetry.attempt_trace import AttemptTrace
from shared.engine.messages import FirstScheduled, NewToken
from shared.rpc.convert import finish_reason_to_proto, logprobs_to_proto
from shared.rpc.outbox import Outbox
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.telemetry.logs import RequestLog, request_log
from shared.telemetry.trace_context import trace_id_of

MAX_EVENTS = 65_536
"""Events that may wait for a router to read them; then its session is ended. A step is one event."""


class Session:
    """Sends events to one router. `SessionServer` opens and closes it."""

    def __init__(self, session_id: int, router_name: str, hello: types_pb2.Hello | None = None) -> None:
        """`hello`: what the router began it with, for its epoch and its heartbeats."""
        self.session_id = session_id
        self.router_name = router_name
        self.hello = hello or types_pb2.Hello()
        self.closed = False
        """Nothing more is sent."""
        self.over = asyncio.Event()
        """Set to end the session from this side; `end_reason` says why."""
        self.end_reason = ""
        self.silent_s = 0.0
        """Since the router's last heartbeat, counted in ticks of our own timer: see `Liveness` of the router."""
        self._outbox = Outbox(MAX_EVENTS)

    def key(self, request_id: str) -> str:
        """A sequence id that is unique on this worker: two routers may choose the same request id."""
        return f"{self.session_id}/{request_id}"

    def end(self, reason: str) -> None:
        """Ends the session from this side."""
        self.end_reason = self.end_reason or reason
        self.over.set()

    def send(self, **event: Any) -> None:
        """Queues an event, named by its field, such as `load=`."""
        envelope = worker_pb2.Events()
        envelope.events.add(**event)
        self.put(envelope.SerializeToString())

    def put(self, events: bytes) -> None:
        """Queues a serialized `Events` of one event; a no-op once the stream is gone. A router that does not read
        loses its session."""
        if not self.closed and not self._outbox.put(events):
            self.end(f"{MAX_EVENTS} events wait to be read")

    def close(self) -> None:
        """Nothing more is sent; what waits to be is dropped. Twice is fine."""
        self.closed = True
        self._outbox.close()

    async def next_envelope(self) -> bytes | None:
        """The next envelope to write; None once the session is closed."""
        events = await self._outbox.take()
        return None if self.closed else events


def attempt_log(logger: logging.Logger, wire_id: str, traceparent: str) -> RequestLog:
    """`wire_id` is a command's request id: the client's request id, "#", the number of the router's call, ".", and that
    of its attempt, which is what the log shows. `traceparent`: the command's, which may be empty."""
    trace_id = trace_id_of(traceparent)
    request_id, _, numbers = wire_id.rpartition("#")
    attempt = numbers.partition(".")[2]
    return request_log(logger, request_id, trace_id, attempt) if request_id else request_log(logger, wire_id, trace_id)


def is_of(taken: types_pb2.TakeOver, wire_id: str, tenant: str) -> bool:
    """Whether a command belongs to the request that a client continues on another router."""
    return wire_id.rpartition("#")[0] == taken.request_id and tenant == taken.tenant


@dataclass(slots=True)
class WorkerRequest:
    """One attempt at a request in one role. Times are time.perf_counter() seconds, 0 for what has not come."""

    session: Session
    request_id: str
    num_tokens: int
    tenant: str
    log: RequestLog
    trace: AttemptTrace | None
    fetch: Fetch = field(default_factory=Fetch)
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    num_cached_tokens: int = 0
    """Prompt tokens found in the pool when it was scheduled."""

    def scheduled(self, first: FirstScheduled) -> None:
        """Its first turn in the engine, or a later one that found more of the prompt in the pool."""
        self.scheduled_at = self.scheduled_at or first.at
        self.num_cached_tokens = first.num_cached_tokens

    def write_token(self, message: types_pb2.SequenceTokens, token: NewToken) -> None:
        """Fills a message with a token of this request."""
        message.request_id = self.request_id
        message.token_ids.append(token.token.token_id)
        if token.finish_reason is not None:
            message.finish_reason = finish_reason_to_proto(token.finish_reason)
        logprobs = logprobs_to_proto(token.token)
        if logprobs is not None:
            message.logprobs.append(logprobs)
        if token.prompt_logprobs:
            message.prompt_logprobs.extend(filter(None, map(logprobs_to_proto, token.prompt_logprobs)))

    def write_prompt(self, message: types_pb2.SequenceTokens, computing_s: float) -> None:
        """Adds what the first token's message says of a prompt that was computed here, in `computing_s` seconds."""
        message.num_cached_tokens = self.num_cached_tokens
        message.num_fetched_tokens = min(self.fetch.num_tokens, self.num_cached_tokens)
        message.num_peer_tokens = min(self.fetch.num_peer_tokens, message.num_fetched_tokens)
        message.prefix_fetch_ms = self.fetch.waited_ms
        message.prefill_queue_ms = (self.scheduled_at - self.queued_at) * 1e3
        message.prefill_compute_ms = computing_s * 1e3
