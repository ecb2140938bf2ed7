"""Ways to ask for structured output: OpenAI's, vLLM's and SGLang's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router.edge.http.bodies import STRICT, TokenIdList, explained
from shared.errors import InvalidRequest
from shared.structure.grammar_text import MANY_BLANKS, ONE_BLANK
from shared.structure.short_numbers import SCHEMA_MAPS, any_object
from shared.structure.structured_output import StructuredOutput, StructureKind

_STRICT: ConfigDict = {**STRICT, "populate_by_name": True}

Schema = str | dict[str, Any]
"""A JSON Schema, as an object or as its text."""
Choices = Annotated[list[str], Field(fail_fast=True)]
_VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values of answers, and no schemas."""


class NamedSchema(BaseModel):
    """`response_format.json_schema`. Answers follow the schema whatever `strict` says."""

    model_config = _STRICT

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Tagged(BaseModel):
    """A part of a free text that follows a schema, between two marks."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    begin: str = Field(min_length=1)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    end: str = ""


class StructuralTag(BaseModel):
    """`structural_tag`: behind each of `triggers` one of `structures` that begins with it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Tagged], Field(fail_fast=True, min_length=1)]
    triggers: Annotated[list[str], Field(fail_fast=True, min_length=1)]


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """`structured_outputs`: one of the first six, and how JSON is written. With a `response_format` it may hold the
    latter alone."""

    model_config = _STRICT

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Schema | None = None
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
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema | None = None
    """SGLang's names of guided_regex, guided_grammar and guided_json."""
    structural_tag: Schema | None = None
    allowed_token_ids: TokenIdList | None = None

    def structured_output(self) -> StructuredOutput | None:
        """What the answer must match; None for free text. Raises InvalidRequest naming the field, also where two fields
        ask for something."""
        found = [
            *self._of_response_format(),
            *self._of_structured_outputs(),
            *self._guided(),
            *self._under_other_names(),
            *_allowed_tokens(self.allowed_token_ids),
        ]
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
        if given.type == "structural_tag":
            yield _tagged({**(given.model_extra or {}), "type": given.type}, "response_format")
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
        options = _Options.of(given)
        found = list(_texts(prefix, given.regex, given.choice, given.grammar))
        if given.json_ is not None:
            found.append(_schema(given.json_, f"{prefix}json", options))
        if given.json_object:
            found.append(_any_object(f"{prefix}json_object", options))
        if given.structural_tag is not None:
            found.append(_tagged(given.structural_tag, f"{prefix}structural_tag"))
        if not found and self.response_format is None:
            raise InvalidRequest(
                "structured_outputs must hold one of json, regex, choice, grammar, json_object and structural_tag, or "
                "stand beside response_format",
                field="structured_outputs",
            )
        yield from found

    def _guided(self) -> Iterator[StructuredOutput]:
        yield from _texts("guided_", self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.guided_json is not None:
            pattern = self.guided_whitespace_pattern
            options = _Options(guidance={"whitespace_pattern": pattern} if pattern is not None else {})
            yield _schema(self.guided_json, "guided_json", options)

    def _under_other_names(self) -> Iterator[StructuredOutput]:
        if self.regex is not None:
            yield StructuredOutput(StructureKind.REGEX, self.regex, source="regex")
        if self.ebnf is not None:
            yield StructuredOutput(StructureKind.GRAMMAR, self.ebnf, source="ebnf")
        if self.json_schema is not None:
            yield _schema(self.json_schema, "json_schema")
        if self.structural_tag is not None:
            yield _tagged(self.structural_tag, "structural_tag")


@dataclass(frozen=True, slots=True)
class _Options:
    """Options for the form of JSON in an answer."""

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


def _tagged(given: Schema, field: str) -> StructuredOutput:
    """Raises InvalidRequest (`field`), also for xgrammar's newer form, which has `format`."""
    value = _object_of(given, field)
    if "format" in value:
        raise InvalidRequest(f"{field}.format is not served here, structures and triggers are", field=f"{field}.format")
    try:
        tag = StructuralTag.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(f"{field}.{explained(error).message}", field=field) from None
    structures = [{"begin": part.begin, "schema": part.schema_ or {}, "end": part.end} for part in tag.structures]
    text = json.dumps({"structures": structures, "triggers": tag.triggers}, ensure_ascii=False)
    return StructuredOutput(StructureKind.STRUCTURAL_TAG, text, source=field)


def _allowed_tokens(token_ids: Sequence[int] | None) -> Iterator[StructuredOutput]:
    """Raises InvalidRequest (`allowed_token_ids`) where no token is allowed."""
    field = "allowed_token_ids"
    if token_ids is None:
        return
    if not token_ids or min(token_ids) < 0:
        raise InvalidRequest(f"{field} must have at least one id, none of them negative", field=field, limit=0)
    ranges: list[list[int]] = []
    for token_id in sorted(set(token_ids)):
        if ranges and token_id == ranges[-1][1] + 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    text = ",".join(str(begin) if begin == last else f"{begin}-{last}" for begin, last in ranges)
    yield StructuredOutput(StructureKind.ALLOWED_TOKENS, text, source=field)


def _schema(given: Schema, field: str, options: _Options | None = None) -> StructuredOutput:
    """Raises InvalidRequest for a text that is no JSON object."""
    options = options or _Options()
    schema = _object_of(given, field)
    try:
        if options.closed:
            schema = closed(schema)
        if options.guidance:
            schema = {**schema, "x-guidance": {**_object(schema.get("x-guidance")), **options.guidance}}
        text = json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from None
    return StructuredOutput(StructureKind.JSON_SCHEMA, text, source=field)


def _object_of(given: Schema, field: str) -> dict[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON object", field=field)
    return value


def closed(schema: Any) -> Any:
    """The schema in which objects with named properties have no others, where it does not say so itself."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = dict(schema)
    for name, part in schema.items():
        if name in SCHEMA_MAPS and isinstance(part, dict):
            parts[name] = {key: closed(one) for key, one in part.items()}
        elif name not in _VALUES:
            parts[name] = closed(part)
    if "additionalProperties" not in parts and ("properties" in parts or "patternProperties" in parts):
        parts["additionalProperties"] = False
    return parts


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
