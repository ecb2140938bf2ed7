"""The types between the router's edge (HTTP, gRPC) and its core (admission, placement, dispatch)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from services.router.traces.call_trace import NO_TRACE, CallTrace
from shared.engine.finish_reason import FinishReason as FinishReason
from shared.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Resume:
    """What the client already has of an answer that began on another call."""

    token_ids: tuple[int, ...] = ()
    num_chars: int | None = None  # of the text that came with them; None: all that they make certain
    finish_reason: FinishReason | None = None  # set: it has all, nothing is to be computed


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How an answer's tokens become text."""

    skip_special_tokens: bool = True
    include_stop: bool = False
    """The stop string that ends an answer, or the text of the client's stop token, is part of it."""
    kept_special: frozenset[str] = frozenset()
    """Special tokens that are text all the same: marks by which the edge finds tool calls and reasoning."""


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
    trace: CallTrace = NO_TRACE  # of the call that it is a part of
    priority: int = 0  # higher goes first if the queue is ordered by priority
    session: str = ""  # the turns of one conversation share it; empty = none
    salt: str = ""  # root of its hash chain: only prompts with the same salt share blocks; empty = the tenant's name
    ttft_timeout_s: float = 0.0  # seconds from arrival to the first token; 0 = the router's target
    resume: Resume | None = None  # set: the answer goes on behind these tokens, and takes over a running id
    text: TextOptions = PLAIN_TEXT

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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one output token and of the most likely alternatives, from the unmodified logits."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


class TokenDelta(NamedTuple):
    """New tokens of one request; `finish_reason` is set on the last delta. A tuple: one is made a token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id if requested
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # on the first delta if requested: of the prompt's second token and on


@dataclass(slots=True)
class TtftSplit:
    """Where the time to the first token went, milliseconds; see proto TtftSplit for each part's meaning."""

    queue_ms: float = 0.0
    placement_ms: float = 0.0
    reserve_ms: float = 0.0
    prefix_fetch_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    return_ms: float = 0.0
    ttft_ms: float = 0.0
    ship_exposed_ms: float = 0.0
    first_decode_step_ms: float = 0.0

    @property
    def parts_ms(self) -> dict[str, float]:
        """What adds up to `ttft_ms`, in the order in which it is shown, by name without the unit."""
        return {
            "queue": self.queue_ms,
            "placement": self.placement_ms,
            "reserve": self.reserve_ms,
            "prefix_fetch": self.prefix_fetch_ms,
            "prefill_queue": self.prefill_queue_ms,
            "prefill_compute": self.prefill_compute_ms,
            "return": self.return_ms,
        }


@dataclass(slots=True)
class RequestSummary:
    """A request's cost so far; final once its last delta was read."""

    num_cached_tokens: int = 0  # prompt tokens whose KV was not recomputed
    num_fetched_tokens: int = 0  # of these, tokens fetched from other workers or store nodes
    num_peer_tokens: int = 0  # of the fetched ones, tokens from other workers' pools
    ttft: TtftSplit = field(default_factory=TtftSplit)
    prefill_worker: str = ""  # empty: the decode worker prefilled
    decode_worker: str = ""
    last_token_at: float = 0.0  # time.perf_counter() when the workers' last token came
    delivered_at: float = 0.0  # time.perf_counter() when the client had taken all, or was gone
    reserve_on_worker_ms: float = 0.0  # of the split's reserve_ms, the decode worker's own part
    decode_ms: float = 0.0  # on the decode worker, from the join or its first token to the last; 0 = not known
    preempted_ms: float = 0.0  # of that, without blocks


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

    @property
    def summary(self) -> RequestSummary:
        """Timings and cache hits so far: the same object at every call, complete after the last delta."""
        ...

    async def aclose(self) -> None:
        """Frees everything the request holds in the whole cluster; cancels it if it still runs. Idempotent."""
        ...


class Core(Protocol):
    """The router behind its edge."""

    def submit(self, request: Request) -> RunningRequest:
        """Queues a request; raises Overloaded when the queue is full, RequestRunning on a running id, which a request
        with `resume` of the same tenant takes over."""
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
