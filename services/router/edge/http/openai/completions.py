"""`POST /v1/completions`: OpenAI's text completions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from services.router.dispatch.request import FinishReason, Request, TokenLogprobs
from services.router.edge.http.answer_parts import (
    DONE,
    ChunkSuffix,
    Envelope,
    Totals,
    choice_end,
    start_member,
)
from services.router.edge.http.bodies import StringList, TokenIdList, TokenIdLists, parse_body
from services.router.edge.http.endpoint import ParsedRequest
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.openai.logprobs import CompletionLogprobs, prompt_logprobs
from services.router.edge.http.openai.schemas import CommonRequest
from services.router.edge.http.openai.unsupported import COMPLETION_FIELDS
from services.router.edge.input_processor import PromptOptions
from services.router.edge.output_stream import OutputDelta
from services.router.edge.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from services.router.edge.text.prompt_tokenizer import Prompt, TextPrompt, TokensPrompt
from services.router.views.timings import tandem_member
from shared.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16
_KIND = "text_completion"


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | TokenIdList | StringList | TokenIdLists
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def asks_of_prompt(self) -> bool:
        """Whether the answer says something of the prompt itself."""
        return bool(self.echo) or self.prompt_logprobs is not None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives for each token of the prompt; with `echo` the prompt is a part of what `logprobs` describes."""
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(CompletionRequest, body)
    request.check_supported(COMPLETION_FIELDS)
    if request.max_tokens == 0 and not request.asks_of_prompt:
        raise InvalidRequest(
            "max_tokens must be at least 1, or 0 with echo or prompt_logprobs", field="max_tokens", limit=1
        )
    return request


class Completions:
    """The endpoint's dialect."""

    errors = OpenAIErrors()

    def __init__(self, tokenizer: Tokenizer, model_name: str, defaults: GenerationDefaults = NO_DEFAULTS) -> None:
        self._tokenizer = tokenizer
        self.model_name = model_name
        self._defaults = defaults

    def parse(self, body: bytes) -> ParsedCompletion:
        """Raises InvalidRequest naming the field."""
        request = parse_completion(body)
        prompts = _prompts(request)
        return ParsedCompletion(
            prompts=prompts,
            n=request.n or 1,
            num_computed=request.best_of or request.n or 1,
            sampling=self._sampling(request),
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            options=PromptOptions(request.truncate_prompt_tokens, tuple(request.bad_words or ()), request.text_options),
            session=request.session,
            priority=request.asked_priority,
            retain_s=request.retain_s,
            model=request.model or "",
            cache_salt=request.cache_salt or "",
            request_id=request.request_id or "",
            stream=bool(request.stream),
            resumed=request.resumed_choices,
            dialect=self,
            body=request,
        )

    def _sampling(self, request: CompletionRequest) -> SamplingParams:
        """For an answer of no tokens one is computed: it comes with what the prompt's tokens are like."""
        sampling = request.sampling_params(request.max_tokens or None, request.logprobs, self._defaults, request.n or 1)
        if request.max_tokens == 0:
            sampling = replace(sampling, max_tokens=1)
        return replace(sampling, prompt_logprobs=request.wanted_prompt_logprobs)

    def prompt_logprobs(self, request: Request, delta: OutputDelta) -> list[dict[str, object] | None]:
        """`prompt_logprobs` of an answer's first delta."""
        return prompt_logprobs(self._tokenizer, request.prompt_token_ids, delta.prompt_logprobs)

    def echoes(self, request: CompletionRequest, plan: Sequence[Request]) -> list[str]:
        """The text each choice begins with."""
        if not request.echo:
            return [""] * len(plan)
        texts = [
            prompt.text
            if isinstance(prompt, TextPrompt)
            else self._tokenizer.decode(plan[i * (request.n or 1)].prompt_token_ids)
            for i, prompt in enumerate(_prompts(request))
        ]
        # What was begun on an earlier call has its echo.
        return ["" if begun.resumed_token_ids else texts[i // (request.n or 1)] for i, begun in enumerate(plan)]

    def logprobs(self, request: CompletionRequest, plan: Sequence[Request]) -> list[CompletionLogprobs]:
        """One builder a choice; empty where none were asked for."""
        if request.logprobs is None:
            return []
        as_ids = request.return_tokens_as_token_ids
        return [CompletionLogprobs(self._tokenizer, choice.resumed_token_ids, as_ids) for choice in plan]


@dataclass(frozen=True, slots=True)
class ParsedCompletion(ParsedRequest):
    """See `ParsedRequest`."""

    dialect: Completions
    body: CompletionRequest

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> CompletionStream:
        """See `ParsedRequest`."""
        return CompletionStream(self.dialect, self.body, plan, request_id)

    def body_writer(self, plan: Sequence[Request], request_id: str) -> CompletionBody:
        """See `ParsedRequest`."""
        return CompletionBody(self.dialect, self.body, plan, request_id)


class CompletionStream:
    """A completion as server-sent events."""

    def __init__(
        self, dialect: Completions, request: CompletionRequest, plan: Sequence[Request], request_id: str
    ) -> None:
        self._request = request
        self._plan = plan
        self._echoes = dialect.echoes(request, plan)
        self._logprobs = dialect.logprobs(request, plan)
        self._totals = Totals(plan, request.n or 1)
        self._envelope = Envelope(f"cmpl-{request_id}", _KIND, plan[0].adapter_name or dialect.model_name)
        self._suffixes = ChunkSuffix(plan, include_usage=request.include_usage, continuous=request.continuous_usage)
        self._detailed = bool(request.return_token_ids) or bool(self._logprobs)
        self._begun = [False] * len(plan)
        self._before = [f'{self._envelope.head}{{"index": {i}, "text": ' for i in range(len(plan))]
        self._behind = ', "logprobs": null, "finish_reason": null}]'

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """One event, or none for text that is still held back."""
        delta = _kept(self._request, delta)
        suffix = self._suffixes.next(index, len(delta.token_ids))
        if self._begun[index] and not self._detailed and delta.finish is None:
            if not delta.text:
                return b""
            return f"{self._before[index]}{json.dumps(delta.text)}{self._behind}{suffix}".encode()
        text = delta.text
        choice: dict[str, object] = {"index": index}
        extra: dict[str, object] = {}
        if not self._begun[index]:
            self._begun[index] = True
            text = self._echoes[index] + text
            extra = start_member(self._plan[index])
            if self._request.return_token_ids:
                choice["prompt_token_ids"] = self._plan[index].prompt_token_ids
        choice["text"] = text
        choice["logprobs"] = self._described(index, delta) if self._logprobs else None
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        choice.update(choice_end(delta.finish))
        if delta.finish is None:
            return self._envelope.chunk(choice, suffix, extra)
        self._totals.add(index, delta.finish)
        return self._envelope.chunk(choice, suffix, tandem_member(delta.finish.record, extra))

    def _described(self, index: int, delta: OutputDelta) -> dict[str, list[object]]:
        return _described(self._logprobs[index], self._request, self._plan[index], delta)

    def closing(self) -> bytes:
        """The usage chunk where asked for, and [DONE]."""
        if not self._request.include_usage:
            return DONE
        return self._envelope.usage_chunk(self._totals.usage(), self._totals.extension()) + DONE


class CompletionBody:
    """A completion as one JSON body."""

    def __init__(
        self, dialect: Completions, request: CompletionRequest, plan: Sequence[Request], request_id: str
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._plan = plan
        self._model_name = plan[0].adapter_name or dialect.model_name
        self._id = f"cmpl-{request_id}"
        self._texts = [[echo] for echo in dialect.echoes(request, plan)]
        self._logprobs = dialect.logprobs(request, plan)
        self._token_ids: list[list[int]] = [[] for _ in plan]
        self._parts: list[dict[str, list[object]]] = [{} for _ in plan]
        self._prompt_logprobs: list[list[dict[str, object] | None]] = [[None] for _ in plan]
        self._ends: list[dict[str, object]] = [{} for _ in plan]
        self._totals = Totals(plan, request.n or 1)

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes a delta."""
        delta = _kept(self._request, delta)
        self._texts[index].append(delta.text)
        self._token_ids[index] += delta.token_ids
        if self._logprobs:
            described = _described(self._logprobs[index], self._request, self._plan[index], delta)
            for name, values in described.items():
                self._parts[index].setdefault(name, []).extend(values)
        if delta.prompt_logprobs and self._request.prompt_logprobs is not None:
            self._prompt_logprobs[index] = self._dialect.prompt_logprobs(self._plan[index], delta)
        if delta.finish is not None:
            self._totals.add(index, delta.finish)
            self._ends[index] = choice_end(delta.finish)

    def body(self) -> bytes:
        """OpenAI's `text_completion` object."""
        response = {
            "id": self._id,
            "object": _KIND,
            "created": int(time.time()),
            "model": self._model_name,
            "choices": [self._choice(index) for index in range(len(self._plan))],
            "usage": self._totals.usage(),
            **self._totals.extension(),
        }
        return json.dumps(response).encode()

    def _choice(self, index: int) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": self._parts[index] or None,
            **self._ends[index],
        }
        if self._request.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
            choice["prompt_token_ids"] = self._plan[index].prompt_token_ids
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs[index]
        return {**choice, **self._totals.choice_extension(index)}


def _kept(request: CompletionRequest, delta: OutputDelta) -> OutputDelta:
    """A delta without the token that was computed for the prompt's sake, where no answer was asked for."""
    if request.max_tokens != 0:
        return delta
    finish = delta.finish
    if finish is not None:
        finish = replace(finish, reason=FinishReason.LENGTH, usage=replace(finish.usage, num_output_tokens=0))
    return OutputDelta("", (), (), finish, delta.prompt_logprobs)


def _described(
    builder: CompletionLogprobs, request: CompletionRequest, begun: Request, delta: OutputDelta
) -> dict[str, list[object]]:
    """`logprobs` of a delta; an echoed prompt's come with the first one."""
    if not request.echo or builder.has_begun or begun.resumed_token_ids:
        return builder.part(delta.token_ids, delta.logprobs)
    cut = [TokenLogprobs(entry.logprob, entry.top[: request.logprobs]) for entry in delta.prompt_logprobs]
    prompt = builder.prompt(begun.prompt_token_ids, cut)
    answer = builder.part(delta.token_ids, delta.logprobs)
    return {name: [*values, *answer[name]] for name, values in prompt.items()}


def _prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of the four shapes that OpenAI allows."""
    prompt = request.prompt
    with_special = request.add_special_tokens is not False
    if isinstance(prompt, str):
        return [TextPrompt(prompt, with_special)]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", field="prompt", limit="at least 1")
    prompts: list[Prompt] = []
    token_ids: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            token_ids.append(item)
        elif isinstance(item, str):
            prompts.append(TextPrompt(item, with_special))
        else:
            prompts.append(TokensPrompt(item))
    return prompts or [TokensPrompt(token_ids)]
