"""A multipart form (RFC 7578), read as it arrives: small fields whole, one file piece by piece."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from shared.errors import InvalidRequest

MAX_HEAD_BYTES = 4096
"""Most bytes of one part's header fields."""
MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Field:
    """A field that is no file."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileBegins:
    """The pieces that follow are this file's."""

    name: str
    filename: str


@dataclass(frozen=True, slots=True)
class FileData:
    """A piece of the file."""

    data: bytes


Part = Field | FileBegins | FileData


async def parts(content_type: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[Part]:
    """The form's parts in order. Raises InvalidRequest (`body`) for what is no such form, or breaks a limit."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise InvalidRequest("the body must be multipart/form-data with a boundary", field="content-type")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
    buffer = bytearray(b"\r\n")  # so that the first delimiter is like all others
    reader = _Reader(buffer, pieces)
    if (await reader.until(delimiter, 2 + len(delimiter))).strip():
        raise _bad("it does not begin with its boundary")
    for _ in range(MAX_PARTS):
        end = await reader.take(2)
        if end == b"--":
            await reader.drain()
            return
        if end != b"\r\n":
            raise _bad("a boundary is not followed by a line end")
        head = await reader.until(b"\r\n\r\n", MAX_HEAD_BYTES)
        name, filename = _disposition(head)
        if filename is None:
            yield Field(name, (await reader.until(delimiter, MAX_FIELD_BYTES)).decode("utf-8", "replace"))
            continue
        yield FileBegins(name, filename)
        async for data in reader.pieces_until(delimiter):
            yield FileData(data)
    raise InvalidRequest(f"the form has more than {MAX_PARTS} parts", field="body", limit=MAX_PARTS)


class _Reader:
    def __init__(self, buffer: bytearray, pieces: AsyncIterator[bytes]) -> None:
        self._buffer = buffer
        self._pieces = pieces

    async def _more(self) -> None:
        async for piece in self._pieces:
            if piece:
                self._buffer += piece
                return
        raise _bad("it ends too early")

    async def take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._more()
        return self._cut(count, 0)

    async def until(self, mark: bytes, limit: int) -> bytes:
        """What comes before a mark that is at most `limit` bytes away; the mark is dropped."""
        while (at := self._buffer.find(mark)) < 0:
            if len(self._buffer) > limit + len(mark):
                raise InvalidRequest(f"a part of the form is longer than {limit} bytes", field="body", limit=limit)
            await self._more()
        if at > limit:
            raise InvalidRequest(f"a part of the form is longer than {limit} bytes", field="body", limit=limit)
        return self._cut(at, len(mark))

    async def pieces_until(self, mark: bytes) -> AsyncIterator[bytes]:
        """The bytes before a mark, in pieces and without a limit; the mark is dropped."""
        while (at := self._buffer.find(mark)) < 0:
            safe = len(self._buffer) - len(mark) + 1  # the mark may have begun behind that
            if safe > 0:
                yield self._cut(safe, 0)
            await self._more()
        if at:
            yield self._cut(at, 0)
        self._cut(0, len(mark))

    async def drain(self) -> None:
        """What follows the form's end is dropped."""
        async for _ in self._pieces:
            pass

    def _cut(self, count: int, dropped: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[: count + dropped]
        return taken


def _disposition(head: bytes) -> tuple[str, str | None]:
    """Name and file name of a part."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        title, _, value = line.partition(":")
        if title.strip().lower() == "content-disposition" and value.strip().lower().startswith("form-data"):
            given = {name.lower(): _plain(text) for name, text in _PARAMETER.findall(value)}
            if "name" in given:
                return given["name"], given.get("filename")
    raise _bad("a part has no name")


def _plain(text: str) -> str:
    """A parameter without its escapes: backslashes, and the three of HTML's forms."""
    for escape, sign in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        text = text.replace(escape, sign)
    return re.sub(r"\\(.)", r"\1", text)


def _bad(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is no multipart form: {why}", field="body")
