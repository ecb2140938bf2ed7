"""The types between the router's edge (HTTP, gRPC) and its core (admission, placement, dispatch)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.router.dispatch.record import Ask, RequestRecord
from shared.engine.finish_reason import FinishReason as FinishReason
from shared.engine.sampling_params import Pooling, SamplingParams
from shared.telemetry.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class Resume:
    """What the client already has of an answer that began on another call."""

    token_ids: tuple[int, ...] = ()
    num_chars: int | None = None  # of the text that came with them; None: all that they make certain
    finish_reason: FinishReason | None = None  # set: it has all, nothing is to be computed
    sampler_version: int = 0  # that the tokens were sampled with; 0: the first


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How an answer's tokens become text."""

    skip_special_tokens: bool = True
    include_stop: bool = False
    """The stop string that ends an answer, or the text of the client's stop token, is part of it."""
    kept_special: frozenset[str] = frozenset()
    """Special tokens that are text all the same: marks by which the edge finds tool calls and reasoning."""
    is_by_token: bool = False
    """Tokens that came together become one output each: it matters which of them brought which text."""


PLAIN_TEXT = TextOptions()


@dataclass(frozen=True, slots=True)
class Request:
    """One validated client request, tokenized, with sampling resolved (seed and max_tokens set)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    arrived_at: float = 0.0  # time.perf_counter() when the edge accepted it, seconds
    timeout_s: float = 0.0  # 0 = none
    trace: TraceContext | None = None  # of the call that it is a part of: see `Ask`
    is_traced: bool = False  # the router records spans of it
    priority: int = 0  # higher goes first if the queue is ordered by priority
    retain_s: float = 0.0  # how long workers keep its prefix at least after each use, where there is room for that
    next_turn_s: float | None = None  # from the answer's end until the session's next request; None: not said
    session: str = ""  # the turns of one conversation share it; empty = none
    salt: str = ""  # root of its hash chain: only prompts with the same salt share blocks; empty = the tenant's name
    ttft_timeout_s: float = 0.0  # seconds from arrival to the first token; 0 = the router's target
    resume: Resume | None = None  # set: the answer continues behind these tokens, and takes over a running id
    text: TextOptions = PLAIN_TEXT
    adapter: str = ""  # digest of the adapter that is added to the model; empty: none
    adapter_name: str = ""  # what it was asked for by

    @property
    def chain_salt(self) -> str:
        """The salt of its hash chain."""
        return self.salt or self.tenant

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the client's prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def resumed_token_ids(self) -> tuple[int, ...]:
        """Output tokens that the client has from an earlier call."""
        return self.resume.token_ids if self.resume is not None else ()

    @property
    def num_input_tokens(self) -> int:
        """What a prefill worker is given: the prompt and the resumed output; 0 where nothing is left to answer."""
        return 0 if self.is_complete else self.num_prompt_tokens + len(self.resumed_token_ids)

    @property
    def is_complete(self) -> bool:
        """The client has the whole answer from an earlier call."""
        return self.resume is not None and self.resume.finish_reason is not None

    def new_record(self) -> RequestRecord:
        """An empty record of it."""
        sampling = self.sampling
        return RequestRecord(
            Ask(
                self.request_id,
                self.tenant,
                self.arrived_at or time.perf_counter(),
                len(self.prompt_token_ids),
                id(self.prompt_token_ids),
                sampling.max_tokens,
                sampling.temperature,
                sampling.top_p,
                self.ttft_timeout_s,
                self.trace,
                self.is_traced,
            )
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one output token and of the most likely alternatives, from the unmodified logits."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


class FoundAnswer(NamedTuple):
    """One of the likeliest answers that a beam search found."""

    token_ids: tuple[int, ...]  # up to and including the one that ended it
    finish_reason: FinishReason
    score: float
    logprob: float  # the sum over its tokens


class TokenDelta(NamedTuple):
    """New tokens of one request; `finish_reason` is set on the last delta. A tuple: one is made a token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id if requested
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # on the first delta if requested: of the prompt's second token and on
    beams: tuple[FoundAnswer, ...] = ()  # of a beam search, whose only delta has no tokens: the best first

    def by_token(self) -> list[TokenDelta]:
        """The same as one delta a token."""
        last = len(self.token_ids) - 1
        if last < 1:
            return [self]
        return [
            TokenDelta(
                (token_id,),
                self.logprobs[i : i + 1],
                self.finish_reason if i == last else None,
                () if i else self.prompt_logprobs,
            )
            for i, token_id in enumerate(self.token_ids)
        ]


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One prompt."""

    request_id: str  # unique among those that run
    token_ids: tuple[int, ...]
    pooling: Pooling
    tenant: str
    salt: str  # of its hash chain; for a mean one that no other prompt has, since none of it may be cached
    timeout_s: float  # 0 = none


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of a pooled prompt."""

    vector: bytes  # [hidden_size] fp32, little-endian
    num_cached_tokens: int


class RunningRequest(Protocol):
    """One request in the core, for one reader on the event loop; always `aclose()` it."""

    def take(self) -> TokenDelta | None:
        """All tokens since the last call as one delta, or None. The last delta has a finish reason and comes after the
        request has freed everything in the cluster. Raises a TandemError on failure, after the tokens that came before
        it."""
        ...

    def notify(self, reader: asyncio.Future[None]) -> None:
        """Sets the future's result as soon as `take` has something to return or raise, perhaps at once."""
        ...

    @property
    def ended(self) -> bool:
        """It finished without error, and all deltas were taken."""
        ...

    async def aclose(self) -> None:
        """Frees everything the request holds in the whole cluster; cancels it if it still runs. Idempotent."""
        ...


class Core(Protocol):
    """The router behind its edge."""

    def submit(self, request: Request, record: RequestRecord) -> RunningRequest:
        """Queues a request; raises Overloaded when the queue is full, RequestRunning on a running id, which a request
        with `resume` of the same tenant takes over. `record` is the request's: the core writes into it, and is through
        with it once the last delta was read, the request failed, or `aclose` has returned."""
        ...

    def max_prompt_tokens(self) -> int:
        """Longest sequence (prompt + output) in tokens that the connected workers can hold; 0 before any connects."""
        ...

    def not_ready_reason(self) -> str:
        """Empty when a prompt can be served now; else a message about what is missing."""
        ...

    def check_room(self, tenant: str, priority: int, ttft_timeout_s: float) -> None:
        """Raises Overloaded where `submit` would refuse such a request now, however short its prompt; it changes
        nothing. `ttft_timeout_s` as in Request."""
        ...

    def idle_room(self) -> int:
        """Requests that could start now, and that no other request would notice: none while one waits or no worker is
        free to compute a prompt, and none on a worker of which half is in use."""
        ...

    async def pool(self, request: PoolRequest) -> Pooled:
        """Reads a prompt for its hidden states alone. Raises Overloaded, WorkerLost, DeadlineExceeded, Draining, and
        InvalidRequest where the workers cannot."""
        ...
