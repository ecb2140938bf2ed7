"""From what a client sent to a validated, tokenized request in the core, and back to text."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.router.edge.output_stream import OutputStream
from services.router.edge.scheduling import SchedulingHints
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenancy import chain_salt
from services.router.request import Core, Request
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, NotFound, PromptTooLong, WorkerLost
from shared.model.chat_template import ChatTemplate
from shared.model.tokenizer import Tokenizer

MAX_REQUEST_ID_LEN = 128
_INLINE_TEXT_LEN = 4096
"""Longer texts, in characters, are tokenized in a thread: the event loop streams other requests meanwhile."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A plain text, tokenized with the model's special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content` (text), rendered with the model's chat template."""

    messages: Sequence[Mapping[str, str]]


Prompt = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What comes with a prompt: the caller, the time of arrival, the names."""

    model: str = ""  # empty: the served one
    request_id: str = ""  # empty: drawn
    arrived_at: float = field(default_factory=time.perf_counter)  # seconds
    timeout_s: float = 0.0  # 0 = none
    trace: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    scheduling: SchedulingHints = field(default_factory=SchedulingHints)
    cache_salt: str = ""  # the client's own; prefixes are shared only with requests of the same one


def checked_request_id(request_id: str) -> str:
    """The client's id, or a drawn one when empty; raises InvalidRequest (`request_id`)."""
    if not request_id:
        return str(uuid.uuid4())
    if len(request_id) > MAX_REQUEST_ID_LEN or not all("!" <= c <= "~" for c in request_id):
        raise InvalidRequest(
            f"request_id must be at most {MAX_REQUEST_ID_LEN} printable ASCII characters without spaces",
            field="request_id",
            limit=MAX_REQUEST_ID_LEN,
        )
    return request_id


class InputProcessor:
    """Validates and tokenizes prompts, and starts them in the core. Stateless; any number at once."""

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        model_name: str,
        settings: EdgeSettings,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._chat_template = chat_template
        self._settings = settings

    def check_model(self, model: str) -> None:
        """Passes for the served model's name and for no name; raises NotFound (`model`)."""
        if model and model != self.model_name:
            raise NotFound(
                f"the model {model!r} is not served here; {self.model_name!r} is", field="model", value=model
            )

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        info: CallInfo,
        default_max_tokens: int | None = None,
    ) -> Request:
        """The request that `start` takes, with seed and max_tokens set.

        Without `sampling.max_tokens` the answer may be as long as the context allows, or `default_max_tokens`
        where that is less. Raises NotFound, InvalidRequest, PromptTooLong, and WorkerLost while no worker is
        connected whose limit is known.
        """
        self.check_model(info.model)
        request_id = checked_request_id(info.request_id)
        self._check_token_ids("stop_token_ids", sampling.stop_token_ids)
        token_ids = await self._token_ids(prompt)
        prompt_field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        num_left = self._num_tokens_left(len(token_ids), prompt_field)
        if sampling.max_tokens is not None and sampling.max_tokens > num_left:
            limit = num_left + len(token_ids)
            raise PromptTooLong(
                f"max_tokens is too large: {sampling.max_tokens}; {limit} tokens fit in all "
                f"and the prompt takes {len(token_ids)}, so at most {num_left} are left for the answer",
                field="max_tokens",
                limit=num_left,
                value=sampling.max_tokens,
            )
        max_tokens = num_left if default_max_tokens is None else min(default_max_tokens, num_left)
        limits = [s for s in (info.timeout_s, self._settings.request_timeout_s) if s > 0]
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling.resolved(seed=secrets.randbits(64), max_tokens=max_tokens),
            tenant=info.scheduling.tenant,
            salt=chain_salt(self._settings.tenants, info.scheduling.tenant, info.cache_salt),
            arrived_at=info.arrived_at,
            timeout_s=min(limits, default=0.0),
            trace=dict(info.trace),
            priority=info.scheduling.priority,
            session=info.scheduling.session,
            ttft_timeout_s=info.scheduling.ttft_timeout_s,
        )

    def start(self, requests: Sequence[Request]) -> OutputStream:
        """The answers to prepared requests; entering the stream submits them."""
        return OutputStream(self.core, requests, self.tokenizer)

    async def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, at least one, all in the vocabulary."""
        if isinstance(prompt, TokensPrompt):
            if not prompt.token_ids:
                raise InvalidRequest("prompt must not be empty", field="prompt", limit="at least 1 token")
            self._check_token_ids("prompt", prompt.token_ids)
            return tuple(prompt.token_ids)
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise InvalidRequest("prompt must not be empty", field="prompt", limit="at least 1 character")
            text_len = len(prompt.text)
        else:
            text_len = sum(len(message["content"]) for message in prompt.messages)
        if text_len <= _INLINE_TEXT_LEN:
            return self._encode(prompt)
        return await asyncio.to_thread(self._encode, prompt)

    def _encode(self, prompt: TextPrompt | ChatPrompt) -> tuple[int, ...]:
        if isinstance(prompt, TextPrompt):
            return tuple(self.tokenizer.encode(prompt.text))
        rendered = self._chat_template.render(prompt.messages)
        # The template writes the special tokens itself.
        token_ids = tuple(self.tokenizer.encode(rendered, add_special_tokens=False))
        if not token_ids:
            raise InvalidRequest("messages render to an empty prompt", field="messages")
        return token_ids

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.tokenizer.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise InvalidRequest(
                f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}",
                field=name,
                limit=f"0 to {vocab_size - 1}",
                value=wrong,
            )

    def _num_tokens_left(self, num_prompt_tokens: int, prompt_field: str) -> int:
        """How many output tokens fit behind the prompt, at least 1."""
        limit = self.core.max_prompt_tokens()
        if limit == 0:
            reason = self.core.not_ready_reason() or "no worker is connected"
            raise WorkerLost(f"nothing can be served now: {reason}")
        if num_prompt_tokens >= limit:
            raise PromptTooLong(
                f"{prompt_field} is too long: {num_prompt_tokens} tokens, "
                f"but {limit} fit in all and 1 must be left for the answer",
                field=prompt_field,
                limit=limit - 1,
                value=num_prompt_tokens,
            )
        return limit - num_prompt_tokens
