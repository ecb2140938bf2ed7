"""A structure in llguidance's own language. Texts in, text out: nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from shared.errors import brief
from shared.structure.short_numbers import any_object, with_short_numbers
from shared.structure.structured_output import ReasoningPart, StructuredOutput, StructureKind

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ONE_BLANK = r"[\x20\x0A\x0D\x09]"
"""Whitespace between two tokens of a JSON text, unless a schema sets it: nothing, or this. A weak
model would else write whitespace to the end of its answer."""
MANY_BLANKS = ONE_BLANK + "{1,64}"
"""Whitespace between two tokens of a JSON text where a request asks for any whitespace."""

_WHITESPACE_OPTIONS = ("whitespace_pattern", "whitespace_flexible")
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


_ANSWER = "answer"
_BLANKS = r"[ \n\r\t]{1,16}"
"""Between reasoning and answer."""


def grammar_text(structure: StructuredOutput, vocabulary: LLTokenizer, end_tokens: Collection[int]) -> str:
    """The grammar in the form that `llguidance.LLMatcher` takes. Raises ValueError with the reason for a text that is
    no schema or grammar.

    `end_tokens`: ids that end an answer."""
    answer = _answer(structure, vocabulary, end_tokens)
    return answer if structure.reasoning is None else _behind(structure.reasoning, answer, vocabulary)


def mark_text(mark: str, vocabulary: LLTokenizer) -> str:
    """A mark as symbols of Lark: the special tokens that it has, and the characters between them."""
    symbols: list[str] = []
    spelled: list[int] = []
    for token_id in (*vocabulary.tokenize_str(mark, parse_special=True), None):
        if token_id is not None and not vocabulary.is_special_token(token_id):
            spelled.append(token_id)
            continue
        if spelled:
            symbols.append(json.dumps(vocabulary.decode_str(spelled)))
            spelled = []
        if token_id is not None:
            symbols.append(f"<[{token_id}]>")
    return " ".join(symbols) if any(symbol.startswith("<") for symbol in symbols) else json.dumps(mark)


def _behind(reasoning: ReasoningPart, answer: str, vocabulary: LLTokenizer) -> str:
    """The answer behind its reasoning, which is any text without tokens of the vocabulary that are marks."""
    begin, end = mark_text(reasoning.begin, vocabulary), mark_text(reasoning.end, vocabulary)
    thoughts = "spelled"
    if end.startswith("<"):  # characters end it too: in the text they look like the token
        thoughts = f"(spelled | ANY {end})"
    start = thoughts if reasoning.is_open else f"({begin} {thoughts})?"
    lark = (
        f"start: {start} BLANKS? @{_ANSWER}\n"
        f"spelled[suffix={json.dumps(reasoning.end)}]: ANY\n"
        f"ANY: /(.|\\n)*/\n"
        f"BLANKS: /{_BLANKS}/\n"
    )
    if answer.lstrip().startswith("{"):
        (grammar,) = json.loads(answer)["grammars"]
    else:
        grammar = {"lark_grammar": answer}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**grammar, "name": _ANSWER}]}, ensure_ascii=False)


def _answer(structure: StructuredOutput, vocabulary: LLTokenizer, end_tokens: Collection[int]) -> str:
    from llguidance import LLMatcher

    match structure.kind:
        case StructureKind.JSON_OBJECT:
            return _json(json.dumps(any_object()))
        case StructureKind.JSON_SCHEMA:
            return _json(structure.text)
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(structure.text)
        case StructureKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(map(_literal, structure.choices)))
        case StructureKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(structure.text))
        case StructureKind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(_tags(structure.text, vocabulary))
        case StructureKind.ALLOWED_TOKENS:
            return LLMatcher.grammar_from_lark(_tokens_alone(structure.text, end_tokens))


def _tags(text: str, vocabulary: LLTokenizer) -> str:
    """Text up to the first trigger, what has to follow it, and so on."""
    structures, triggers = _structures_of(text)
    rules = []
    for number, (begin, schema, end) in enumerate(structures):
        trigger = max((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default="")
        if not trigger:
            raise ValueError(f"no trigger begins the structure {brief(begin, 40)!r}")
        written = mark_text(trigger, vocabulary)
        if written.startswith("<"):
            rules.append(f"trigger_{number}: ANY {written}")
        else:
            rules.append(f"trigger_{number}[lazy]: ANY {written}")
        around = [mark_text(mark, vocabulary) if mark else "" for mark in (begin.removeprefix(trigger), end)]
        inner = json.dumps(json_schema(schema), ensure_ascii=False)
        rules.append(f"tag_{number}: trigger_{number} {around[0]} %json {inner} {around[1]}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({tags})* rest", "rest: ANY", "ANY: /(.|\\n)*/", *rules])


def _structures_of(text: str) -> tuple[list[tuple[str, dict[str, Any], str]], list[str]]:
    """(begin, schema, end) of each structure, and the triggers."""
    try:
        value = json.loads(text)
        found = [(tag["begin"], tag.get("schema") or {}, tag.get("end") or "") for tag in value["structures"]]
        triggers = list(value["triggers"])
        texts = [*triggers, *(mark for begin, _, end in found for mark in (begin, end))]
        is_valid = bool(found) and all(isinstance(text, str) for text in texts) and all(triggers)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid or not all(isinstance(schema, dict) for _, schema, _ in found):
        raise ValueError("it must hold structures, each with begin, schema and end, and triggers")
    return found, triggers


def _tokens_alone(ranges: str, end_tokens: Collection[int]) -> str:
    """A rule that calls itself has no end: without one of the end tokens an answer is as long as it may be."""
    pairs = [(int(begin), int(last or begin)) for begin, _, last in (part.partition("-") for part in ranges.split(","))]
    ends = any(begin <= token_id <= last for token_id in end_tokens for begin, last in pairs)
    return f"start: {'token*' if ends else 'token start'}\ntoken: <[{ranges}]>"


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as llguidance takes it: with whitespace of one character and with short numbers, where its `x-guidance`
    does not say otherwise (`whitespace_pattern`, `whitespace_flexible`; `any_numbers` is our own)."""
    given = schema.get("x-guidance")
    options = dict(given) if isinstance(given, dict) else {}
    written = dict(schema) if options.pop("any_numbers", False) else with_short_numbers(dict(schema))
    if options.keys().isdisjoint(_WHITESPACE_OPTIONS):
        options["whitespace_pattern"] = ONE_BLANK
    return {**written, "x-guidance": options}


def _json(text: str) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(text)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            raise ValueError("a schema is a JSON object")
        schema = json_schema(schema)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # A schema may choose its whitespace itself; it may not choose that keywords are ignored.
    return LLMatcher.grammar_from_json_schema(schema, {}, {"lenient": False})


def _literal(text: str) -> str:
    """An expression that matches this text alone."""
    return "".join(f"\\{char}" if char in _META else char for char in text)


def _lark(grammar: str) -> str:
    if grammar.lstrip().startswith("{"):
        raise ValueError("a grammar begins with a rule, not with a brace")
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises plain Exception for a rule that does not exist
        raise ValueError(str(error)) from error
