"""Uvicorn's HTTP/1.1 protocol with bounds: size and time of heads, time of bodies, connections, unread answers.

A refusal must reach its client. Closing a socket that holds unread bytes makes the kernel send a reset, which may
destroy the answer on its way; so a refused connection is closed for writing only, and what the client still sends is
read and dropped, up to a bound in bytes and time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.router.edge.http.errors import error_headers, error_json
from services.router.edge.limits import LimitSettings
from shared.errors import InvalidRequest, Overloaded, TandemError


class Connections:
    """Open connections of one server, by client address."""

    def __init__(self, limits: LimitSettings) -> None:
        self._max = limits.max_connections
        self._max_per_client = limits.max_connections_per_client
        self._by_client: Counter[str] = Counter()
        self._num_open = 0

    def open(self, client: str) -> Overloaded | None:
        """Counts a connection in; returns why it is refused where it is one too many. `close` it either way."""
        self._num_open += 1
        self._by_client[client] += 1
        if self._num_open > self._max:
            return Overloaded(f"more than {self._max} connections are open", field="connections", limit=self._max)
        if 0 < self._max_per_client < self._by_client[client]:
            return Overloaded(
                f"more than {self._max_per_client} connections from {client} are open",
                field="connections",
                limit=self._max_per_client,
            )
        return None

    def close(self, client: str) -> None:
        """Counts it out."""
        self._num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


class _Transport:
    """The connection's transport, whose `close` lets an answer arrive first."""

    def __init__(self, inner: asyncio.Transport, close: Callable[[], None], closing: Callable[[], bool]) -> None:
        self._inner = inner
        self.close = close
        self.is_closing = closing

    def write(self, data: bytes) -> None:
        """Drops what comes when the connection is lost; uvloop would raise."""
        if not self._inner.is_closing():
            self._inner.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Every refusal is an error in OpenAI's shape that names the limit."""

    def __init__(
        self,
        *arguments: Any,
        limits: LimitSettings,
        open_connections: Connections,
        refused: Callable[[int], None] = lambda _: None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._refused = refused
        self._limits = limits
        self._open_connections = open_connections
        self._socket: asyncio.Transport | None = None
        self._in_head = True  # else the request's body is awaited
        self._num_raw_bytes = 0  # received since the last whole request, while in a head
        self._num_head_bytes = 0  # of the parsed part of the head
        self._refusal: tuple[int, TandemError] | None = None
        self._cycles: list[RequestResponseCycle] = []  # those without their whole answer, pipelined ones too
        self._dropping = False  # what arrives is read for the answer's sake alone
        self._num_dropped = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # The transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses the connection where there are too many."""
        self._socket = transport
        super().connection_made(_Transport(transport, self._close, self._is_closing))  # type: ignore[arg-type]
        refusal = self._open_connections.open(self._client_host)
        if refusal is not None:
            self._refuse(refusal.http_status, refusal)
        else:
            self._arm_read(self._limits.header_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers, and the requests that still run as disconnected: uvicorn would end the last one only."""
        self._open_connections.close(self._client_host)
        self._disarm_read()
        self._disarm_write()
        self._socket = None
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses, or drops what belongs to a request that is answered already."""
        if self._dropping or (not self._in_head and self.cycle.response_complete):
            self._num_dropped += len(data)
            if self._num_dropped > self._limits.discard_bytes:
                self._abort()
                return
        if self._dropping:
            return
        if self._in_head:
            self._num_raw_bytes += len(data)
            if self._read_timer is None:
                self._arm_read(self._limits.header_timeout_s, self._head_is_late)
        super().data_received(data)
        # A field that has not ended yet was not handed out by the parser, which keeps all of it.
        if self._in_head and self._num_raw_bytes > 2 * self._limits.max_header_bytes and not self._dropping:
            self._refuse(431, self._head_too_large())

    def pause_writing(self) -> None:
        """The client does not read: starts the timer that closes the connection."""
        super().pause_writing()
        self._disarm_write()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self._abort)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self._disarm_write()

    def shutdown(self) -> None:
        """A connection that only drops bytes is not waited for."""
        if self._dropping:
            self._abort()
        else:
            super().shutdown()

    # The parser's calls

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Part of the request's target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        if len(self.headers) >= self._limits.max_headers:
            limit = self._limits.max_headers
            error = InvalidRequest(f"the request has more than {limit} header fields", field="headers", limit=limit)
            self._fail(431, error)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request starts; its body has a time of its own."""
        self._in_head = False
        self._arm_read(self._limits.body_timeout_s, self._body_is_late)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        """The request is here."""
        super().on_message_complete()
        self._disarm_read()
        self._in_head = True
        self._num_raw_bytes = 0
        self._num_dropped = 0

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: our own reason, or what it did not understand."""
        status, error = self._refusal or (400, InvalidRequest(msg))
        self._refuse(status, error)

    # Bounds

    @property
    def _client_host(self) -> str:
        return self.client[0] if self.client is not None else ""

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_header_bytes:
            self._fail(431, self._head_too_large())

    def _head_too_large(self) -> InvalidRequest:
        limit = self._limits.max_header_bytes
        return InvalidRequest(f"the request's headers are longer than {limit} bytes", field="headers", limit=limit)

    def _fail(self, status: int, error: TandemError) -> None:
        """Stops the parser from within one of its calls; it ends in `send_400_response`."""
        self._refusal = (status, error)
        raise ValueError(error.message)

    def _head_is_late(self) -> None:
        self._read_timer = None
        if self._num_raw_bytes:
            limit = self._limits.header_timeout_s
            error = InvalidRequest(f"the headers did not arrive within {limit:g} s", field="headers", limit=limit)
            self._refuse(408, error)
        elif self._socket is not None:  # a connection that was never used
            self._socket.close()

    def _body_is_late(self) -> None:
        self._read_timer = None
        if self.pipeline:  # it waits for the answer to the request before it, and we do not read
            self._arm_read(self._limits.body_timeout_s, self._body_is_late)
            return
        limit = self._limits.body_timeout_s
        error = InvalidRequest(f"the body did not arrive within {limit:g} s", field="body", limit=limit)
        self._refuse(408, error)

    # Ends of a connection

    def _refuse(self, status: int, error: TandemError) -> None:
        """Answers, unless an answer is on its way already, and closes once the client could read it."""
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        self._disconnect()
        if (
            answering or self.pipeline or self._socket is None
        ):  # a second answer in the middle of the first would be taken for its text
            self._abort()
            return
        body = error_json(error)
        head = [
            b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode()),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            *(b"%s: %s" % field for field in error_headers(error)),
        ]
        self._socket.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self._drop()
        self._refused(status)

    def _disconnect(self) -> None:
        """The requests' clients are gone, as far as these are concerned."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _drop(self) -> None:
        """Nothing more is written; what is read is dropped until the client closes, or for a while."""
        assert self._socket is not None
        self._dropping = True
        self._unset_keepalive_if_required()
        if self._socket.can_write_eof():
            self._socket.write_eof()
        self.flow.resume_reading()
        self._arm_read(self._limits.discard_timeout_s, self._abort)

    def _close(self) -> None:
        """`close` of the transport that uvicorn sees."""
        if self._socket is None or self._dropping:
            return
        if self._in_head:
            self._socket.close()
        else:
            self._drop()

    def _is_closing(self) -> bool:
        return self._dropping or self._socket is None or self._socket.is_closing()

    def _abort(self) -> None:
        if self._socket is not None:
            self._socket.abort()

    def _arm_read(self, after_s: float, call: Callable[[], None]) -> None:
        self._disarm_read()
        self._read_timer = self.loop.call_later(after_s, call)

    def _disarm_read(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _disarm_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
