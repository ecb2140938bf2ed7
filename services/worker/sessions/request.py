"""A request on a worker: the state that both roles share, and what they report about its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.blocks.prefix_fetch.fetch import Fetch
from services.worker.sessions.session import Session
from services.worker.telemetry.attempt_trace import AttemptTrace
from shared.engine.messages import FirstScheduled, NewToken
from shared.rpc.convert import finish_reason_to_proto, logprobs_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.telemetry.logs import RequestLog


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
