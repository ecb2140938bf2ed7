"""What the text of an answer must match: one frozen value object, validated where it is built."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from shared.errors import InvalidRequest

MAX_STRUCTURE_BYTES = 256 * 1024
"""Most bytes of a schema, expression or grammar, or of all choices together, as UTF-8. The router's setting may be
smaller."""
MAX_CHOICES = 4096
MAX_MARK_LEN = 64
"""Characters of a mark of reasoning."""
_TOKEN_RANGES = re.compile(r"\d{1,10}(-\d{1,10})?(,\d{1,10}(-\d{1,10})?)*", re.ASCII)
STRUCTURE_MEMORY_PLANS = 8
"""Number of plans after the last one that sampled for a structured answer for which a runner keeps its state."""


class StructureKind(Enum):
    """The language in which a structure is written. The value is its field in `tandem.v1.StructuredOutput`."""

    JSON_OBJECT = "json_object"
    """Any JSON object."""
    JSON_SCHEMA = "json_schema"
    """A JSON value that a JSON Schema accepts; `text` is the schema."""
    REGEX = "regex"
    """Text that matches a regular expression as a whole; `text` is the expression."""
    CHOICE = "choice"
    """One of `choices`."""
    GRAMMAR = "grammar"
    """Text of a context-free grammar; `text` is llguidance's dialect of Lark, or GBNF (rules with `::=`)."""
    STRUCTURAL_TAG = "structural_tag"
    """Free text in which parts follow schemas; `text` is a JSON object: `structures`, each with `begin`, `schema` and
    `end`, and `triggers`, behind each of which one of the structures that begin with it has to follow."""
    ALLOWED_TOKENS = "allowed_tokens"
    """Any answer of these tokens alone; `text` are their ids and ranges of ids, `5,7-9`. It ends by itself only where
    one of the model's end tokens is among them."""


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Free text that a model writes between two marks before what must match. Raises InvalidRequest naming the mark."""

    begin: str
    end: str
    is_open: bool
    """The prompt ended within it: it has begun, and must come to its end. Else an answer may have none."""

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            if not 0 < len(getattr(self, name)) <= MAX_MARK_LEN:
                limit = f"1 to {MAX_MARK_LEN} characters"
                raise InvalidRequest(f"reasoning.{name} must have {limit}", field=f"reasoning.{name}", limit=limit)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One structure. Raises InvalidRequest naming the field where it is empty or too large; whether it compiles is
    found out by `shared.structure`."""

    kind: StructureKind
    text: str = ""
    choices: tuple[str, ...] = ()
    source: str = field(default="", compare=False)
    """The request's field that it came in, for error messages; empty: that of its kind."""
    reasoning: ReasoningPart | None = None
    """The free text that may come before the structured text."""

    def __post_init__(self) -> None:
        name = self.source or self.kind.value
        if self.kind is StructureKind.CHOICE:
            if not 0 < len(self.choices) <= MAX_CHOICES:
                raise InvalidRequest(
                    f"{name} must hold 1 to {MAX_CHOICES} texts, got {len(self.choices)}",
                    field=name,
                    limit=MAX_CHOICES,
                )
            if not all(self.choices):
                raise InvalidRequest(f"{name} must hold no empty text", field=name, limit="at least 1 character each")
        elif self.kind is not StructureKind.JSON_OBJECT and not self.text.strip():
            raise InvalidRequest(f"{name} must not be empty", field=name, limit="at least 1 character")
        if self.kind is StructureKind.ALLOWED_TOKENS and not _TOKEN_RANGES.fullmatch(self.text):
            limit = "token ids and ranges such as 5,7-9"
            raise InvalidRequest(f"{name} must be {limit}", field=name, limit=limit)
        if self.num_bytes > MAX_STRUCTURE_BYTES:
            raise InvalidRequest(
                f"{name} must take at most {MAX_STRUCTURE_BYTES} bytes, got {self.num_bytes}",
                field=name,
                limit=MAX_STRUCTURE_BYTES,
            )

    @property
    def allowed_token_ids(self) -> tuple[int, ...]:
        """The ids that ALLOWED_TOKENS names, of a range the first and the last; none for other kinds."""
        if self.kind is not StructureKind.ALLOWED_TOKENS:
            return ()
        return tuple(map(int, re.split("[,-]", self.text)))

    @property
    def num_bytes(self) -> int:
        """Bytes of its texts, as UTF-8."""
        # A JSON string may hold half a surrogate pair, which is no text: counted here, refused where it is compiled.
        texts = (self.text, *self.choices)
        return sum(len(text.encode(errors="surrogatepass")) for text in texts)
