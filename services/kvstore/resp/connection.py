"""One connection with pipelined requests: replies come back in the order of the requests."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import hiredis

from services.kvstore.resp.command import pack
from services.kvstore.resp.redis_url import Endpoint, Login

_INCOMPLETE = object()


class LoginRefused(Exception):
    """The server answered, but refused the login."""


class RespConnection(asyncio.Protocol):
    """Any number of requests may be in flight. A lost connection fails them all with ConnectionError."""

    def __init__(self) -> None:
        """Use `connect`."""
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int]] = deque()
        self._replies: list[Any] = []  # of the request at the head of the queue
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """False once lost or closed."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, packed: bytes, num_replies: int) -> asyncio.Future[list[Any]]:
        """Sends commands; returns their replies in order. An error reply is a `hiredis.ReplyError` among them.

        A cancelled caller loses only its own replies.
        """
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            future.set_exception(ConnectionError("the connection is closed"))
            return future
        self._waiting.append((future, num_replies))
        self._transport.write(packed)
        return future

    def abort(self) -> None:
        """Closes at once; waiting requests fail."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self.connection_lost(ConnectionError(f"not a Redis server: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        for future, _ in self._waiting:
            if not future.done():
                future.set_exception(ConnectionError(str(error or "the server closed the connection")))
        self._waiting.clear()

    def _take(self, reply: Any) -> None:
        if not self._waiting:
            return  # an unsolicited message; RESP2 servers send one only before they close
        self._replies.append(reply)
        future, num_replies = self._waiting[0]
        if len(self._replies) == num_replies:
            self._waiting.popleft()
            replies, self._replies = self._replies, []
            if not future.done():
                future.set_result(replies)


async def connect(endpoint: Endpoint, login: Login) -> RespConnection:
    """A connection that is logged in. Raises OSError, or LoginRefused with the server's message. No time limit."""
    loop = asyncio.get_running_loop()
    if endpoint.path:
        _, connection = await loop.create_unix_connection(RespConnection, endpoint.path)
    else:
        _, connection = await loop.create_connection(RespConnection, endpoint.host, endpoint.port, ssl=login.tls)
    commands = []
    if login.password:
        commands.append(pack(("AUTH", login.username or "default", login.password)))
    if login.db:
        commands.append(pack(("SELECT", login.db)))
    try:
        for reply in await connection.ask(b"".join(commands), len(commands)) if commands else ():
            if isinstance(reply, hiredis.ReplyError):
                raise LoginRefused(str(reply))
    except BaseException:
        connection.abort()
        raise
    return connection
