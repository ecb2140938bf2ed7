"""One Redis server: connections that are opened again when lost, and a time limit on every request."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import hiredis

from services.kvstore.resp.command import Command
from services.kvstore.resp.connection import LoginRefused, RespConnection, connect
from services.kvstore.resp.redis_url import Endpoint, Login
from shared.errors import ConfigError, StoreUnavailable

_REFUSALS = ("NOAUTH", "WRONGPASS", "NOPERM")


class RedisConnection(IntEnum):
    """A node's two connections, so that a match does not wait behind a batch of thousands of blocks."""

    READ = 0
    WRITE = 1


class RedisNode:
    """Connects on first use, and again after a loss. Every call raises StoreUnavailable within its time limit."""

    def __init__(self, endpoint: Endpoint, login: Login, timeout_s: float) -> None:
        """`timeout_s` bounds one call, connecting included; with several scripts, each has this time."""
        self.endpoint = endpoint
        self._login = login
        self._timeout_s = timeout_s
        self._connections: dict[RedisConnection, RespConnection] = {}
        self._connecting = {connection: asyncio.Lock() for connection in RedisConnection}

    async def ask(self, commands: Sequence[Command], connection: RedisConnection) -> list[Any]:
        """Their replies in one round trip; error replies are `hiredis.ReplyError` objects among them.

        Takes a second round trip if the server has not cached a script yet.
        """
        replies = await self._ask([command.packed for command in commands], connection, _num_scripts(commands))
        unknown = [
            i
            for i, reply in enumerate(replies)
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")
        ]
        if unknown:
            sources = [commands[i].source or b"" for i in unknown]
            for i, reply in zip(unknown, await self._ask(sources, connection, len(sources)), strict=True):
                replies[i] = reply
        return replies

    async def check(self) -> None:
        """Raises ConfigError for refused credentials or certificates, else StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                [reply] = await (await self._connection(RedisConnection.READ)).ask(Command.of("PING").packed, 1)
            if isinstance(reply, hiredis.ReplyError):
                raise LoginRefused(str(reply)) if str(reply).startswith(_REFUSALS) else ConnectionError(str(reply))
        except LoginRefused as error:
            raise ConfigError(
                f"Redis at {self.endpoint} refuses the credentials: {error}", field="redis_url"
            ) from error
        except ssl.SSLError as error:
            raise ConfigError(f"no TLS with Redis at {self.endpoint}: {error}", field="redis_url") from error
        except OSError as error:
            raise self.unavailable(error) from error

    def close(self) -> None:
        """Ends the connections; idempotent."""
        for connection in self._connections.values():
            connection.abort()
        self._connections.clear()

    def unavailable(self, error: BaseException | str) -> StoreUnavailable:
        """A StoreUnavailable that names this server."""
        reason = str(error) or f"no answer within {self._timeout_s:g} s"
        return StoreUnavailable(f"Redis at {self.endpoint} is unavailable: {reason}", address=str(self.endpoint))

    async def _ask(self, packed: Sequence[bytes], which: RedisConnection, num_scripts: int) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout_s * max(1, num_scripts)):
                connection = await self._connection(which)
                return await connection.ask(b"".join(packed), len(packed))
        except TimeoutError as error:
            # A host that fell silent never closes its connections: the next call opens a new one.
            with contextlib.suppress(KeyError):
                self._connections.pop(which).abort()
            raise self.unavailable("") from error
        except (OSError, LoginRefused) as error:
            raise self.unavailable(error) from error

    async def _connection(self, which: RedisConnection) -> RespConnection:
        connection = self._connections.get(which)
        if connection is not None and connection.is_open:
            return connection
        async with self._connecting[which]:
            connection = self._connections.get(which)
            if connection is None or not connection.is_open:
                connection = self._connections[which] = await connect(self.endpoint, self._login)
            return connection


def _num_scripts(commands: Sequence[Command]) -> int:
    return sum(1 for command in commands if command.source is not None)
