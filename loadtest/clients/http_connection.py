"""HTTP/1.1 with as little work as possible between the socket and the time stamp.

A general client costs some 100 µs a chunk. At 200 streams a second that fills a core and shows as latency of the
server. Here a chunk gets its time stamp in `data_received`, before any other work.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast

import httptools

from loadtest.clients.base import failed
from loadtest.records import FailureCause

MAX_IDLE_S = 3.0
"""Idle connections older than this are not used again. Seconds. Common servers close theirs after 5 s, and a request on
a closing connection would count as a failure of the target."""

OnBody = Callable[[float, bytes], None]


class Response:
    """Status, headers and body; with `on_stream`, a body of status 200 goes there instead."""

    def __init__(self, on_stream: OnBody | None) -> None:
        self.on_stream = on_stream
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._received_at = 0.0
        self.usable = True
        self.idle_since = 0.0

    async def exchange(self, request: bytes, response: Response) -> None:
        """Sends `request` and returns when the response is complete; raises RequestFailed."""
        if self._transport is None or self._transport.is_closing():
            raise failed(FailureCause.DISCONNECTED, "the target closed the connection")
        self._response = response
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        try:
            await response.done
        finally:
            self._response = None
            if not response.done.done() or response.done.cancelled():
                self.close()  # otherwise the rest of the answer would reach the next request
        self.idle_since = time.perf_counter()

    def close(self) -> None:
        """Drops the connection. Idempotent."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Takes the time, then parses."""
        self._received_at = time.perf_counter()
        if self._parser is None or self._response is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(FailureCause.PROTOCOL, f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The target closed the connection, or `close` was called."""
        self.usable = False
        reason = f": {exc}" if exc is not None else ""
        self._fail(FailureCause.DISCONNECTED, f"the connection broke before the answer's end{reason}")

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the response."""
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The status is known."""
        if self._response is not None and self._parser is not None:
            self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._response is None or self._response.done.done():
            return
        if self._response.on_stream is None or self._response.status != 200:
            self._response.body += body
            return
        try:
            self._response.on_stream(self._received_at, body)
        except Exception as error:
            self._response.done.set_exception(error)
            self.close()

    def on_message_complete(self) -> None:
        """The response is complete."""
        if self._parser is not None and not self._parser.should_keep_alive():
            self.usable = False
        if self._response is not None and not self._response.done.done():
            self._response.done.set_result(None)

    def _fail(self, cause: FailureCause, message: str) -> None:
        if self._response is not None and not self._response.done.done():
            self._response.done.set_exception(failed(cause, message))
        self.close()


class ConnectionPool:
    """Connections to one host, one for each concurrent exchange. The newest idle one is used first."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def exchange(
        self,
        request: bytes,
        on_stream: OnBody | None = None,
        on_sent: Callable[[float], None] | None = None,
    ) -> Response:
        """One request and its response; raises RequestFailed.

        `on_sent` gets the time at which the request goes out. If no connection is idle, this is before one is made,
        because a client has to wait for that too.
        """
        connection = self._take()
        if on_sent is not None:
            on_sent(time.perf_counter())
        if connection is None:
            connection = await self._connect()
        self._open.add(connection)
        response = Response(on_stream)
        try:
            await connection.exchange(request, response)
        finally:
            if connection.usable:
                self._idle.append(connection)
            else:
                self._open.discard(connection)
        return response

    def close(self) -> None:
        """Drops all connections. Idempotent."""
        for connection in tuple(self._open):
            connection.close()
        self._open.clear()
        self._idle.clear()

    def _take(self) -> Connection | None:
        oldest = time.perf_counter() - MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.close()
            self._open.discard(connection)
        return None

    async def _connect(self) -> Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, self._host, self._port, ssl=self._tls
            )
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise failed(FailureCause.UNREACHABLE, f"cannot connect to {self._host}:{self._port}: {reason}") from error
        return connection
