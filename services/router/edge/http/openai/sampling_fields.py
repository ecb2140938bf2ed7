"""The fields by which a request says how its tokens are chosen and what its answer must match: OpenAI's, and both
generations of vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from services.router.edge.http.bodies import STRICT, StringList, TokenIdList
from services.router.edge.http.openai.unsupported import refuse_unsupported
from services.router.edge.text.generation_defaults import GenerationDefaults
from shared.engine.sampling_params import (
    DEFAULT_SPECULATION,
    MOST_GUESSES,
    BeamSearch,
    EarlyStopping,
    SamplingParams,
    Speculation,
)
from shared.errors import InvalidRequest, brief
from shared.structure.grammar_text import MANY_BLANKS, ONE_BLANK
from shared.structure.short_numbers import any_object
from shared.structure.structured_output import StructuredOutput, StructureKind

MAX_N = 128
"""Answers to one prompt."""

_STRICT: ConfigDict = {**STRICT, "populate_by_name": True}

Schema = str | dict[str, Any]
"""A JSON Schema, as an object or as its text."""
Choices = Annotated[list[str], Field(fail_fast=True)]

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"structural_tag": ()}


class NamedSchema(BaseModel):
    """`response_format.json_schema`. Answers follow the schema whatever `strict` says."""

    model_config = _STRICT

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """`structured_outputs`: one of the first five, and how JSON is written. With a `response_format` it may hold the
    latter alone."""

    model_config = _STRICT

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace: Literal["compact", "one", "any"] | None = None
    """Between two tokens of JSON: none; none or one character (the default); up to 64."""
    numbers: Literal["short", "any"] | None = None
    """Whether numbers without bounds have at most 20 digits (the default)."""
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is one way here, and nothing to fall back to
    whitespace_pattern: str | None = None


class StructureFields(BaseModel):
    """Fields of structured output that chat and completions share."""

    model_config = _STRICT

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def structured_output(self) -> StructuredOutput | None:
        """What the answer must match; None for free text. Raises InvalidRequest naming the field, also where two fields
        ask for something."""
        found = [*self._of_response_format(), *self._of_structured_outputs(), *self._guided()]
        if len(found) > 1:
            first, second = found[0].source, found[1].source
            raise InvalidRequest(f"{second} excludes {first}: an answer can match one of them", field=second)
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            field = "guided_whitespace_pattern"
            raise InvalidRequest(f"{field} needs guided_json", field=field)
        return found[0] if found else None

    def _of_response_format(self) -> Iterator[StructuredOutput]:
        given = self.response_format
        if given is None:
            return
        options = _Options.of(self.structured_outputs)
        if given.type == "json_object":
            yield _any_object("response_format", options)
        if given.type == "json_schema":
            field = "response_format.json_schema"
            if given.json_schema is None or given.json_schema.schema_ is None:
                raise InvalidRequest(f"{field} must hold a schema", field=field)
            yield _schema(given.json_schema.schema_, f"{field}.schema", options)
        elif given.json_schema is not None:
            field = "response_format.json_schema"
            raise InvalidRequest(f"{field} needs response_format.type to be json_schema", field=field)

    def _of_structured_outputs(self) -> Iterator[StructuredOutput]:
        given = self.structured_outputs
        if given is None:
            return
        prefix = "structured_outputs."
        refuse_unsupported(given.model_extra, _UNSUPPORTED, prefix)
        options = _Options.of(given)
        found = list(_texts(prefix, given.regex, given.choice, given.grammar))
        if given.json_ is not None:
            found.append(_schema(given.json_, f"{prefix}json", options))
        if given.json_object:
            found.append(_any_object(f"{prefix}json_object", options))
        if not found and self.response_format is None:
            raise InvalidRequest(
                "structured_outputs must hold one of json, regex, choice, grammar and json_object, or stand beside "
                "response_format",
                field="structured_outputs",
            )
        yield from found

    def _guided(self) -> Iterator[StructuredOutput]:
        yield from _texts("guided_", self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.guided_json is not None:
            pattern = self.guided_whitespace_pattern
            options = _Options(guidance={"whitespace_pattern": pattern} if pattern is not None else {})
            yield _schema(self.guided_json, "guided_json", options)


@dataclass(frozen=True, slots=True)
class _Options:
    """How JSON is written."""

    closed: bool = False  # objects have no properties but those that their schema names
    guidance: dict[str, object] = field(default_factory=dict)  # options of a schema's `x-guidance`

    @classmethod
    def of(cls, given: StructuredOutputs | None) -> _Options:
        """What `structured_outputs` says; the default without it."""
        if given is None:
            return cls()
        guidance: dict[str, object] = {}
        if given.whitespace is not None:
            pattern = {"compact": None, "one": ONE_BLANK, "any": MANY_BLANKS}[given.whitespace]
            guidance = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
        if given.whitespace_pattern is not None:
            guidance = {"whitespace_pattern": given.whitespace_pattern}
        if given.disable_any_whitespace:
            guidance = {"whitespace_flexible": False}
        if given.numbers == "any":
            guidance["any_numbers"] = True
        return cls(bool(given.disable_additional_properties), guidance)


def _any_object(source: str, options: _Options) -> StructuredOutput:
    if not options.guidance:
        return StructuredOutput(StructureKind.JSON_OBJECT, source=source)
    return _schema(any_object(), source, replace(options, closed=False))


def _texts(prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None) -> Iterator[StructuredOutput]:
    if regex is not None:
        yield StructuredOutput(StructureKind.REGEX, regex, source=f"{prefix}regex")
    if choice is not None:
        yield StructuredOutput(StructureKind.CHOICE, choices=tuple(choice), source=f"{prefix}choice")
    if grammar is not None:
        yield StructuredOutput(StructureKind.GRAMMAR, grammar, source=f"{prefix}grammar")


def _schema(given: Schema, field: str, options: _Options | None = None) -> StructuredOutput:
    """Raises InvalidRequest for a text that is no JSON object."""
    options = options or _Options()
    schema: Any = given
    if isinstance(given, str):
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from None
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{field} must be a JSON object", field=field)
    if options.closed:
        schema = closed(schema)
    if options.guidance:
        schema = {**schema, "x-guidance": {**_object(schema.get("x-guidance")), **options.guidance}}
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), source=field)


def closed(schema: Any) -> Any:
    """The schema in which objects with named properties have no others, where it does not say so itself."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: closed(part) for name, part in schema.items()}
    if "additionalProperties" not in parts and ("properties" in parts or "patternProperties" in parts):
        parts["additionalProperties"] = False
    return parts


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


class SpeculationFields(BaseModel):
    """`speculation` in full."""

    model_config = STRICT

    method: Literal["auto", "off", "ngram", "grammar", "draft", "heads"] = "auto"
    """auto: all that the decode worker is set to; else the only drafter that may guess."""
    max: int | None = None
    """Most tokens that one step guesses."""


class SamplingFields(StructureFields):
    """How tokens are chosen: fields that all endpoints for answers share."""

    model_config = STRICT

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | StringList | None = None
    stop_token_ids: TokenIdList | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: StringList | None = None
    speculation: Literal["auto", "off"] | SpeculationFields | None = None
    """Which guesses of the answer's next tokens may be computed: it changes how fast the answer comes, and nothing
    else."""
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    """Answers that are computed for each prompt: `n` of them are the result, those of the highest mean log-probability;
    of a beam search the beams."""
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    def beam_search(self, n: int) -> BeamSearch | None:
        """The search whose `n` best answers are wanted; None where tokens are drawn. Raises InvalidRequest naming the
        field."""
        if not self.use_beam_search:
            for field, value in (("length_penalty", self.length_penalty), ("early_stopping", self.early_stopping)):
                if value not in (None, 1.0 if field == "length_penalty" else False):
                    raise InvalidRequest(f"{field} needs use_beam_search", field=field)
            return None
        if self.temperature not in (None, 0, 1):
            raise InvalidRequest(
                "temperature must be 0 or absent with use_beam_search, which draws nothing",
                field="temperature",
                limit=0,
            )
        stopping = self.early_stopping if self.early_stopping == "never" else str(bool(self.early_stopping)).lower()
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamSearch(self.best_of or n, n, penalty, cast(EarlyStopping, stopping))

    def check_best(self, n: int, *, is_stream: bool) -> None:
        """Raises InvalidRequest where `n` answers cannot be chosen from those computed."""
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of must be at least n ({n}), got {self.best_of}", field="best_of", limit=n)
        field = "use_beam_search" if self.use_beam_search else "best_of" if (self.best_of or n) > n else ""
        if field and is_stream:
            raise InvalidRequest(f"{field} does not go with stream: the best answer is known at the end", field=field)

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, defaults: GenerationDefaults, n: int = 1
    ) -> SamplingParams:
        """The core's value object of these fields, with the model's defaults, for `n` answers; raises InvalidRequest
        naming the field."""
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's other way to say "off"
            given["top_k"] = 0
        beams = self.beam_search(n)
        if beams is not None:
            given["temperature"] = 0.0
        elif (self.best_of or n) > n and logprobs is None:
            logprobs = 0  # by which they are compared
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **{**(defaults.given if beams is None else {}), **given},
            seed=None if self.seed == -1 else self.seed,  # vLLM's way to say "any"
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_biases(self.logit_bias or {}),
            structured_output=self.structured_output(),
            speculation=_speculation(self.speculation),
            beams=beams,
        )


def _speculation(given: str | SpeculationFields | None) -> Speculation:
    if given is None:
        return DEFAULT_SPECULATION
    if isinstance(given, str):
        return Speculation(given)
    if unknown := next((name for name, value in (given.model_extra or {}).items() if value is not None), ""):
        name, served = brief(unknown, 40), " and ".join(type(given).model_fields)
        raise InvalidRequest(f"speculation has no field {name}: it has {served}", field=f"speculation.{name}")
    return Speculation(given.method, MOST_GUESSES if given.max is None else given.max)


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """The biases by token id, as the core takes them."""
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidRequest(
                f"logit_bias must have token ids as its keys, got {brief(key, 40)!r}", field="logit_bias"
            )
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))
