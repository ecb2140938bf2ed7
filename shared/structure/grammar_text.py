"""A structure in llguidance's own language. Texts in, text out: nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


def grammar_text(structure: StructuredOutput, vocabulary: LLTokenizer) -> str:
    """The grammar in the form that `llguidance.LLMatcher` takes. Raises ValueError with the reason for a text that is
    no schema or grammar."""
    answer = _answer(structure)
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


def _answer(structure: StructuredOutput) -> str:
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
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises plain Exception for a rule that does not exist
        raise ValueError(str(error)) from error
