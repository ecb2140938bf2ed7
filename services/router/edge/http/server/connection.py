"""One HTTP exchange at the ASGI level: the body in, its structure bounded, the reply out, and the client's leaving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.types import Receive, Send

from services.router.edge.http.errors import ErrorShape, error_headers
from services.router.edge.limits import LimitSettings
from shared.errors import Cancelled, InvalidRequest, TandemError

_STRINGS_AT_ONCE = 4096


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
        """What the last part broke."""
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


class BodyTooLargeError(InvalidRequest):
    """The body passes its limit."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is longer than {limit} bytes", field="body", limit=limit)


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The whole body; raises BodyTooLargeError (never reads past it), Cancelled when the client left."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLargeError(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise BodyTooLargeError(max_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


class Reply:
    """What goes back to the client: one JSON body, or an event stream."""

    def __init__(self, send: Send, request_id: str, errors: ErrorShape) -> None:
        self._send = send
        self._errors = errors
        self.request_id = request_id
        self.streaming = False
        """Whether the head of an event stream is out: from then on an error can only be an event."""
        self.done = False
        """Whether the reply is complete."""

    async def json(self, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Sends a complete JSON response."""
        self.done = True
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def open_stream(self) -> None:
        """Sends the head of an event stream."""
        self.streaming = True
        head = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # reverse proxies: pass every event on at once
            (b"x-request-id", self.request_id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def events(self, data: bytes, last: bool = False) -> None:
        """Sends ready-made events; `last` ends the response."""
        self.done = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def error(self, error: TandemError) -> None:
        """Sends an error: by status before the first byte, in mid-stream as the last event (no [DONE])."""
        if self.done:
            return
        if self.streaming:
            await self.events(self._errors.event(error), last=True)
        else:
            headers = error_headers(error)
            if isinstance(error, BodyTooLargeError):  # the rest of the body is dropped, and nothing can come behind it
                headers = [*headers, (b"connection", b"close")]
            await self.json(self._errors.body(error), error.http_status, headers)


@contextlib.asynccontextmanager
async def ended_by_disconnect(receive: Receive, reply: Reply) -> AsyncIterator[None]:
    """Cancels the body of the `async with` when the client goes away, and raises Cancelled then.

    Needs the request's body to have been read, and no other caller of `receive` meanwhile.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not reply.done:  # a server says "disconnect" after a complete reply, too
            gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise Cancelled("the client went away") from None
    finally:
        watcher.cancel()
