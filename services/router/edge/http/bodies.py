"""Bodies of requests: read and bounded, then parsed to models, and what is wrong with them in words that name the
field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from services.router.edge.limits import LimitSettings
from shared.errors import Cancelled, InvalidRequest

MAX_SETTING_BYTES = 64 * 1024
"""Of a body that changes the cluster: weights, adapters, sessions."""
MAX_JSON_DEPTH = 201
"""The parser's own limit."""

STRICT = ConfigDict(strict=True, extra="allow", frozen=True)
"""What a schema does not name is looked at in `unsupported`."""

_STRINGS_AT_ONCE = 4096
_MOST_PROBLEMS = 64
"""Of a body that are looked at: one is enough, and lists and objects may have one an element."""

# One wrong element is enough: a list of a million of them must not become a million error objects.
TokenIdList = Annotated[list[int], Field(fail_fast=True)]
StringList = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIdList], Field(fail_fast=True)]

M = TypeVar("M", bound=BaseModel)


class BodyTooLargeError(InvalidRequest):
    """The body passes its limit."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is longer than {limit} bytes", field="body", limit=limit)


class EncodedBodyError(InvalidRequest):
    """The body is packed."""

    http_status = 415

    def __init__(self, encoding: str) -> None:
        super().__init__(f"Content-Encoding {encoding!r} is not read here: send the body as it is", field="body")


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The whole body; raises BodyTooLargeError (never reads past it), EncodedBodyError, Cancelled when the client
    left."""
    encoding = headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise EncodedBodyError(encoding)
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLargeError(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for piece in pieces(receive):
        parts.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise BodyTooLargeError(max_bytes)
    return b"".join(parts)


async def pieces(receive: Receive) -> AsyncIterator[bytes]:
    """The body as it arrives; raises Cancelled when the client left."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def check_json_size(body: bytes, limits: LimitSettings, context_len: int) -> None:
    """Raises InvalidRequest (`body`) for a body with more values or members than the limits allow.

    A list of `context_len` token ids always passes. Costs two or three milliseconds a megabyte, in short turns.
    The structure is known before the body is parsed, because parsing holds the event loop for all of it: a value costs
    the parser about 0.3 µs, an array, object or member about 2 µs; a text costs next to nothing.
    """
    max_values = max(limits.max_json_values, context_len + 1024)
    counts = _Counts(max_values, limits.max_json_members)
    if not counts.passes(body, 0, len(body)):  # what stands in texts was counted, too: look closer
        await _count_outside_strings(body, _Counts(max_values, limits.max_json_members))


class _Counts:
    def __init__(self, max_values: int, max_members: int) -> None:
        self._max_values = max_values
        self._max_members = max_members
        self._num_values = 0
        self._num_members = 0

    def passes(self, body: bytes, start: int, end: int) -> bool:
        """Counts a part; whether all parts so far are within the limits."""
        self._num_values += body.count(b",", start, end)
        self._num_members += sum(body.count(sign, start, end) for sign in (b"[", b"{", b":"))
        return self._num_values < self._max_values and self._num_members <= self._max_members

    def error(self) -> InvalidRequest:
        """The refusal that names the limit that the last part exceeded."""
        if self._num_members > self._max_members:
            what, limit = "arrays, objects and members", self._max_members
        else:
            what, limit = "values", self._max_values
        return InvalidRequest(f"the body has more than {limit} JSON {what}", field="body", limit=limit)


async def _count_outside_strings(body: bytes, counts: _Counts) -> None:
    # Without its escapes, every quotation mark begins or ends a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    end, num_strings = -1, 0
    while True:
        start = plain.find(b'"', end + 1)
        if not counts.passes(plain, end + 1, start if start >= 0 else len(plain)):
            raise counts.error()
        end = plain.find(b'"', start + 1)
        if start < 0 or end < 0:  # the end, or a string without one, of which the parser tells
            return
        num_strings += 1
        if num_strings % _STRINGS_AT_ONCE == 0:
            await asyncio.sleep(0)


def parse_body(cls: type[M], body: bytes) -> M:
    """The body as a `cls`. Raises InvalidRequest naming the field."""
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise explained(error) from None


def explained(error: ValidationError) -> InvalidRequest:
    """The first field at fault, with what its type would have allowed; where it is an object or a list, with what is at
    fault within. Of many problems the first _MOST_PROBLEMS count."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)[:_MOST_PROBLEMS]
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
    same = [(_place(p["loc"]), p["msg"]) for p in problems if p["loc"][0] == field]
    places = {place for place, _ in same}
    reasons = dict.fromkeys(
        f"{place}: {reason[:1].lower()}{reason[1:]}"
        for place, reason in same
        if not any(other.startswith((f"{place}.", f"{place}[")) for other in places)
    )
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
