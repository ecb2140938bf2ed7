"""From what a client sent to a validated, tokenized request in the core, and back to text."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from services.router.dispatch.request import PLAIN_TEXT, Core, Request, Resume, TextOptions
from services.router.edge.answer.families import AnswerFormats
from services.router.edge.answer.reasoning import Thinking
from services.router.edge.model_names import ModelNames
from services.router.edge.output_stream import INLINE_TOKENS, OutputStream, output_processor
from services.router.edge.request_ledger import Ledger, Uncounted
from services.router.edge.scheduling import SchedulingHints, check_next_turn, is_visible_ascii
from services.router.edge.settings import EdgeSettings, StructureSettings
from services.router.edge.tenants.rate_limits import RateLimits, chain_salt
from services.router.edge.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from services.router.edge.text.pooling import PoolingConfig
from services.router.edge.text.prompt_tokenizer import (
    ChatPrompt,
    Prompt,
    PromptTokenizer,
    TokensPrompt,
    check_bad_words,
    check_num_tokens,
)
from services.router.views.traces.call_trace import NO_TRACE, CallTrace, CallTraces
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, Overloaded, PromptTooLong, WorkerLost
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.tokenizer import Tokenizer
from shared.seeds import SAMPLER_VERSION
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import ReasoningPart, StructuredOutput, StructureKind

MAX_REQUEST_ID_LEN = 128
NUM_END_TOKENS = 8
"""The end of a prompt, where a template may have begun the model's reasoning, or closed it."""
DRAWN_SEED_BITS = 53
"""A drawn seed goes to the client, which may keep JSON's numbers as doubles."""


class StructureCheck:
    """Compiles each structure once, beside the event loop. Any number at once."""

    def __init__(self, compiler: StructureCompiler, settings: StructureSettings) -> None:
        self._compiler = compiler
        self._settings = settings

    async def check(self, structure: StructuredOutput | None) -> None:
        """Raises InvalidRequest naming the request's field, with the limit or llguidance's reason; Overloaded where too
        many wait to be compiled, or this one takes too long: what one may cost is limited, so that the machine is busy,
        and a later request finds it compiled."""
        if structure is None:
            return
        field, limits = structure.source or structure.kind.value, self._settings
        if structure.num_bytes > limits.max_bytes:
            raise InvalidRequest(
                f"{field} must take at most {limits.max_bytes} bytes, got {structure.num_bytes}",
                field=field,
                limit=limits.max_bytes,
            )
        compiled = asyncio.wrap_future(self._compiler.prepare(structure))
        try:
            # Shielded: other requests may wait for the same one. A `wait_for` may lose a cancellation.
            async with asyncio.timeout(limits.compile_timeout_ms / 1e3):
                await asyncio.shield(compiled)
        except TimeoutError:
            compiled.add_done_callback(lambda future: future.cancelled() or future.exception())
            raise Overloaded(
                f"{field} is not compiled after {limits.compile_timeout_ms} ms",
                field=field,
                limit=limits.compile_timeout_ms,
            ) from None
        except InvalidRequest as error:
            reason = error.details.get("reason")
            raise InvalidRequest(f"{field} cannot be compiled: {reason}", field=field) from None


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What comes with a prompt: the caller, the time of arrival, the names."""

    model: str = ""  # empty: the served one
    request_id: str = ""  # empty: drawn
    arrived_at: float = field(default_factory=time.perf_counter)  # seconds
    timeout_s: float = 0.0  # 0 = none
    trace: CallTrace = NO_TRACE
    scheduling: SchedulingHints = field(default_factory=SchedulingHints)
    cache_salt: str = ""  # the client's own; prefixes are shared only with requests of the same one


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a request says about its prompt and the text of its answer."""

    truncate_to: int | None = None  # only the prompt's last tokens are kept; -1: as many as leave room for the answer
    bad_words: tuple[str, ...] = ()  # that the answer must not have
    text: TextOptions = PLAIN_TEXT


DEFAULT_OPTIONS = PromptOptions()


def checked_request_id(request_id: str) -> str:
    """The client's id, or a drawn one when empty; raises InvalidRequest (`request_id`)."""
    if not request_id:
        return str(uuid.uuid4())
    if len(request_id) > MAX_REQUEST_ID_LEN or not is_visible_ascii(request_id):
        raise InvalidRequest(
            f"request_id must be at most {MAX_REQUEST_ID_LEN} printable ASCII characters without spaces",
            field="request_id",
            limit=MAX_REQUEST_ID_LEN,
        )
    return request_id


def prompt_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of a prompt's last tokens, special ones included."""
    return tokenizer.decode(token_ids[-NUM_END_TOKENS:], skip_special_tokens=False)


def _truncated(token_ids: Sequence[int], truncate_to: int | None, num_room: int) -> Sequence[int]:
    """The last `truncate_to` tokens; -1: the last `num_room`."""
    if truncate_to is None:
        return token_ids
    return token_ids[-max(1, num_room if truncate_to == -1 else truncate_to) :]


class Sessions(Protocol):
    """What workers retain for sessions."""

    async def close_session(self, tenant: str, session: str) -> int:
        """See `InputProcessor.close_session`."""

    def expect_session(self, tenant: str, session: str, next_turn_s: float) -> None:
        """See `InputProcessor.expect_session`."""


class InputProcessor:
    """Validates and tokenizes prompts, and starts them in the core. Stateless; any number at once."""

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        model_name: str,
        settings: EdgeSettings,
        structures: StructureCompiler,
        defaults: GenerationDefaults = NO_DEFAULTS,
        *,
        names: ModelNames | None = None,
        rates: RateLimits | None = None,
        ledger: Ledger | None = None,
        traces: CallTraces | None = None,
        pooling: PoolingConfig | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        """`structures`: for the model's vocabulary; `defaults`: what a request takes that does not say how to
        sample; `names`: `model_name` and what else clients may call it; `rates` and `traces`: shared with
        other models' processors; `ledger`: counts requests; none: they are not counted; `sessions`: without them
        there are no workers that could retain anything."""
        self.core = core
        self.defaults = defaults
        self.formats = AnswerFormats.of(chat_template, settings.tool_call_parser, settings.reasoning_parser)
        """How the model writes its answers."""
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.names = names or ModelNames(model_name)
        self.chat_template = chat_template
        self._prompts = PromptTokenizer(tokenizer, chat_template, settings.limits)
        self._structures = StructureCheck(structures, settings.structured_output)
        self._settings = settings
        self.rates = rates or RateLimits(settings)
        """Shared by all APIs."""
        self.ledger: Ledger = ledger or Uncounted()
        """Counts the end of every request, over all APIs."""
        self.pooling = pooling or PoolingConfig()
        """How embeddings are pooled, or why there are none."""
        self.traces = traces or CallTraces()
        """Where each call begins its trace."""
        self._sessions = sessions

    async def close_session(self, tenant: str, session: str) -> int:
        """Workers retain nothing for the sake of a tenant's session any more; returns the number of blocks that this
        frees. Raises WorkerLost, DeadlineExceeded."""
        return 0 if self._sessions is None else await self._sessions.close_session(tenant, session)

    def expect_session(self, tenant: str, session: str, next_turn_s: float) -> None:
        """A tenant's session comes back that many seconds from now: what workers retain for those that come back later
        is evicted first. Raises InvalidRequest (`next_turn_s`)."""
        check_next_turn("next_turn_s", next_turn_s, 1.0)
        if self._sessions is not None:
            self._sessions.expect_session(tenant, session, next_turn_s)

    def check_model(self, model: str, tenant: str) -> None:
        """Passes for the names that the served model has for the tenant, and for no name; raises NotFound (`model`)."""
        self.names.check(model, tenant)

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        info: CallInfo,
        default_max_tokens: int | None = None,
        options: PromptOptions = DEFAULT_OPTIONS,
    ) -> Request:
        """The request that `start` takes, with seed and max_tokens set.

        Without `sampling.max_tokens` the answer may be as long as the context allows, or `default_max_tokens`
        where that is less. Raises NotFound, InvalidRequest, PromptTooLong, Overloaded where too many structures wait
        to be compiled, and WorkerLost while no worker is connected whose limit is known.
        """
        self.check_model(info.model, info.scheduling.tenant)
        adapter = self.names.adapter(info.model, info.scheduling.tenant)
        request_id = checked_request_id(info.request_id)
        self._prompts.check_token_ids("stop_token_ids", sampling.stop_token_ids)
        self._prompts.check_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
        if sampling.structured_output is not None:
            self._prompts.check_token_ids("allowed_token_ids", sampling.structured_output.allowed_token_ids)
        check_bad_words(options.bad_words)
        if options.bad_words:
            bad = (*sampling.bad_sequences, *self._prompts.bad_sequences(options.bad_words))
            sampling = replace(sampling, bad_sequences=bad)
        context_len = self.context_len()
        token_ids = await self._token_ids(prompt, sampling, options, context_len)
        num_left = context_len - len(token_ids)
        if isinstance(prompt, ChatPrompt):
            sampling = self._behind_reasoning(sampling, token_ids)
        await self._structures.check(sampling.structured_output)
        max_tokens = num_left if default_max_tokens is None else min(default_max_tokens, num_left)
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling.resolved(seed=random.getrandbits(DRAWN_SEED_BITS), max_tokens=max_tokens),
            tenant=info.scheduling.tenant,
            salt=self._salt(info, sampling),
            arrived_at=info.arrived_at,
            timeout_s=self._settings.deadline_s(info.timeout_s),
            trace=info.trace.context,
            is_traced=info.trace.is_recorded,
            priority=info.scheduling.priority,
            retain_s=info.scheduling.retain_s,
            session=info.scheduling.session,
            next_turn_s=info.scheduling.next_turn_s,
            ttft_timeout_s=info.scheduling.ttft_timeout_s,
            text=options.text,
            adapter="" if adapter is None else adapter.digest,
            adapter_name="" if adapter is None else adapter.name,
        )

    async def _token_ids(
        self, prompt: Prompt, sampling: SamplingParams, options: PromptOptions, context_len: int
    ) -> tuple[int, ...]:
        """The prompt's tokens, cut where the client wants that. Raises PromptTooLong where they leave no room for the
        answer."""
        num_room = context_len - (sampling.max_tokens or 1)
        if isinstance(prompt, TokensPrompt):
            prompt = TokensPrompt(_truncated(prompt.token_ids, options.truncate_to, num_room))
        token_ids = await self._prompts.token_ids(prompt, context_len)
        token_ids = tuple(_truncated(token_ids, options.truncate_to, num_room))
        check_num_tokens(len(token_ids), context_len, "messages" if isinstance(prompt, ChatPrompt) else "prompt")
        num_left = context_len - len(token_ids)
        if sampling.max_tokens is not None and sampling.max_tokens > num_left:
            raise PromptTooLong(
                f"max_tokens is too large: {sampling.max_tokens}; {context_len} tokens fit in all "
                f"and the prompt takes {len(token_ids)}, so at most {num_left} are left for the answer",
                field="max_tokens",
                limit=num_left,
                value=sampling.max_tokens,
            )
        return token_ids

    def _behind_reasoning(self, sampling: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
        """The structure of a conversation's answer begins where the model's reasoning ends."""
        structure, marks = sampling.structured_output, self.formats.reasoning
        if structure is None or marks is None or structure.reasoning is not None:
            return sampling
        if structure.kind is StructureKind.ALLOWED_TOKENS:  # a bound of each token, not a form of the text
            return sampling
        thinking = marks.behind(prompt_end(self.tokenizer, token_ids))
        if thinking is Thinking.OVER:
            return sampling
        part = ReasoningPart(marks.begin, marks.end, is_open=thinking is Thinking.BEGUN)
        return replace(sampling, structured_output=replace(structure, reasoning=part))

    def _salt(self, info: CallInfo, sampling: SamplingParams) -> str:
        """Where the prompt's log-probabilities are asked for, all of it has to be computed: its blocks are no prefix of
        any other's, nor another's of them."""
        salt = chain_salt(self._settings.tenants, info.scheduling.tenant, info.cache_salt)
        return salt if sampling.prompt_logprobs is None else f"{salt}\0prompt={secrets.token_hex(8)}"

    async def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, as a request with it would have them; raises what `prepare` does for a prompt."""
        return await self._prompts.token_ids(prompt, self.context_len())

    async def pooled_token_ids(self, prompt: Prompt, field: str, truncate_to: int | None) -> tuple[int, ...]:
        """Token ids of a text that is read and not answered: its last `truncate_to` (-1: as many as fit). Raises
        InvalidRequest (`field`) for an empty text, and what `token_ids` does."""
        context_len = self.context_len()
        try:
            token_ids = tuple(await self._prompts.token_ids(prompt, context_len))
            token_ids = tuple(_truncated(token_ids, truncate_to, context_len - 1))
            check_num_tokens(len(token_ids), context_len, field)
        except InvalidRequest as error:
            if error.field != "prompt":
                raise
            details = {name: value for name, value in error.details.items() if name != "field"}
            raise type(error)(error.message.replace("prompt", field, 1), field=field, **details) from None
        return token_ids

    async def resumed(self, request: Request, resume: Resume, seed: int | None) -> Request:
        """A prepared request whose answer continues behind the tokens that the client has; `seed` is the answer's own.

        Raises InvalidRequest naming what of `resume` cannot be: an id outside the vocabulary, more tokens than
        max_tokens, text that the tokens do not make, a stop string before their end, a sampled answer without a
        seed or of another sampler.
        """
        token_ids, limit = resume.token_ids, request.sampling.max_tokens
        assert limit is not None, "prepared requests have it"
        if resume.finish_reason is None and len(token_ids) >= limit:
            raise InvalidRequest(
                f"resume.token_ids has {len(token_ids)} tokens, and max_tokens is {limit}: the answer has ended",
                field="resume.token_ids",
                limit=limit,
                value=len(token_ids),
            )
        self._prompts.check_token_ids("resume.token_ids", token_ids)
        if token_ids and resume.finish_reason is None and not request.sampling.is_greedy:
            if seed is None:
                raise InvalidRequest("resume needs the seed of the answer that it continues", field="seed")
            if resume.sampler_version != SAMPLER_VERSION:
                raise InvalidRequest(
                    f"resume.sampler_version is {resume.sampler_version or 1}, that of this router and its workers is "
                    f"{SAMPLER_VERSION}: only the sampler that began an answer can continue it; ask for it anew",
                    field="resume.sampler_version",
                    limit=SAMPLER_VERSION,
                    value=resume.sampler_version or 1,
                )
        if seed is not None:
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        request = replace(request, resume=resume)
        if not request.is_complete:
            await output_processor(request, request.new_record(), self.tokenizer)  # raises for a stop string
        if len(token_ids) <= INLINE_TOKENS:
            self._check_num_chars(resume, request.text)
        else:
            await asyncio.to_thread(self._check_num_chars, resume, request.text)
        return request

    def _check_num_chars(self, resume: Resume, text: TextOptions) -> None:
        detokenizer = self.tokenizer.stream(text.skip_special_tokens, text.kept_special)
        limit = len(detokenizer.push(resume.token_ids) + detokenizer.flush())
        if resume.num_chars is not None and not 0 <= resume.num_chars <= limit:
            raise InvalidRequest(
                f"resume.num_chars must be from 0 to {limit}, the characters of these tokens, got {resume.num_chars}",
                field="resume.num_chars",
                limit=limit,
                value=resume.num_chars,
            )

    def detokenize(self, token_ids: Sequence[int], field: str) -> str:
        """Text of token ids, special ones included; raises InvalidRequest (`field`) for an id outside the
        vocabulary."""
        self._prompts.check_token_ids(field, token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def start(self, requests: Sequence[Request], ledger: Ledger | None = None) -> OutputStream:
        """The answers to prepared requests; entering the stream submits them. `ledger` counts them, else the one of
        all."""
        return OutputStream(self.core, requests, self.tokenizer, ledger or self.ledger)

    def context_len(self) -> int:
        """Tokens of prompt and answer that fit in all; raises WorkerLost before any worker was connected."""
        limit = self.core.max_prompt_tokens()
        if limit == 0:
            reason = self.core.not_ready_reason() or "no worker is connected"
            raise WorkerLost(f"nothing can be served now: {reason}", retry_after_s=1.0)
        return limit
