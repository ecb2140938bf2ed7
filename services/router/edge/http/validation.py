"""Bodies to models, and what is wrong with them in words that name the field."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import InvalidRequest

MAX_JSON_DEPTH = 201
"""The parser's own limit."""

STRICT = ConfigDict(strict=True, extra="allow", frozen=True)
"""What a schema does not name is looked at in `unsupported`."""

# One wrong element is enough: a list of a million of them must not become a million error objects.
TokenIdList = Annotated[list[int], Field(fail_fast=True)]
StringList = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIdList], Field(fail_fast=True)]

M = TypeVar("M", bound=BaseModel)


def parse_body(cls: type[M], body: bytes) -> M:
    """The body as a `cls`. Raises InvalidRequest naming the field."""
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise explained(error) from None


def explained(error: ValidationError) -> InvalidRequest:
    """The first field at fault, with everything that its type would have allowed."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        if "recursion limit" in first["msg"]:
            return InvalidRequest(
                f"the body is not valid JSON here: it is nested deeper than {MAX_JSON_DEPTH} levels",
                field="body",
                limit=MAX_JSON_DEPTH,
            )
        return InvalidRequest(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object")
    field = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return InvalidRequest(f"{field} is missing", field=field)
    same = [problem for problem in problems if problem["loc"][0] == field]
    reasons = dict.fromkeys(f"{_place(p['loc'])}: {p['msg'][:1].lower()}{p['msg'][1:]}" for p in same)
    return InvalidRequest("; or ".join(reasons), field=field)


def _place(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` from a location, without the names of the union members tried."""
    place = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part[:1].islower() and part not in ("str", "int"):
            place += f".{part}"
    return place
