"""Talking to Redis with bounded time: every failure is a StoreUnavailable, none of them names a password."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    NoScriptError,
    RedisError,
)

from services.kvstore.scripts import LuaScript
from shared.errors import ConfigError, StoreUnavailable

SCHEMES = ("redis", "rediss", "unix")
_REFUSALS = (AuthenticationError, AuthenticationWrongNumberOfArgsError)


class RedisClient:
    """Commands and scripts on one server, over a pool of connections that mend themselves.

    Every call raises StoreUnavailable when the server does not answer in time, refuses, or runs out of memory.
    """

    def __init__(self, url: str, *, timeout_s: float, max_connections: int) -> None:
        """`timeout_s` bounds each round trip, connecting included. Connects on first use.

        Raises ConfigError (field redis_url) for a URL that is none.
        """
        self._timeout_s = timeout_s
        self.address = redacted(url)
        """Where the server is, without credentials."""
        self._pool = _pool(url, timeout_s, max_connections)
        self._redis = Redis.from_pool(self._pool)

    async def check(self) -> None:
        """One PING. Raises ConfigError when the server refuses our credentials, else StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.ping()
        except (RedisError, OSError) as error:
            # On a unix socket redis-py wraps what the server said into a plain ConnectionError.
            if isinstance(error, _REFUSALS) or isinstance(error.__cause__, _REFUSALS):
                raise ConfigError(
                    f"Redis at {self.address} refuses the credentials: {error}", field="redis_url"
                ) from error
            raise self._unavailable(error) from error

    async def command(self, *parts: bytes | str | int) -> Any:
        """One command, one round trip; the reply as Redis gives it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._redis.execute_command(*parts)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def commands(self, *commands: Sequence[bytes | str | int], atomic: bool = False) -> list[Any]:
        """Several commands in one round trip, in order; `atomic` lets no other client in between.

        Each may take the timeout. Raises for the first that fails; the others have run unless `atomic`.
        """
        try:
            return await self._pipeline(commands, atomic)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def scripts(self, script: LuaScript, *calls: Sequence[bytes | str | int]) -> list[Any]:
        """Runs a script once for each list of arguments, in one round trip.

        One more where the server, freshly started, does not know the script: so scripts must be idempotent.
        """
        commands = [("EVALSHA", script.sha, 0, *arguments) for arguments in calls]
        try:
            try:
                return await self._pipeline(commands, False)
            except NoScriptError:
                _, *replies = await self._pipeline([("SCRIPT LOAD", script.source), *commands], False)
                return replies
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def close(self) -> None:
        """Closes all connections; twice is fine."""
        await self._redis.aclose()

    async def _pipeline(self, commands: Sequence[Sequence[bytes | str | int]], atomic: bool) -> list[Any]:
        async with (
            asyncio.timeout(self._timeout_s * len(commands)),
            self._redis.pipeline(transaction=atomic) as pipe,
        ):
            for command in commands:
                pipe.execute_command(*command)
            return await pipe.execute()

    def _unavailable(self, error: BaseException) -> StoreUnavailable:
        reason = str(error) or f"no answer within {self._timeout_s:g} s"
        return StoreUnavailable(f"Redis at {self.address} is unavailable: {reason}", address=self.address)


def redacted(url: str) -> str:
    """scheme://host:port/db or unix://path, without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _pool(url: str, timeout_s: float, max_connections: int) -> BlockingConnectionPool:
    if urlsplit(url).scheme not in SCHEMES:
        raise ConfigError(
            f"redis_url must start with {' or '.join(f'{scheme}://' for scheme in SCHEMES)}", field="redis_url"
        )
    try:
        return BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A retry hides an outage for as long as it takes; callers want to know at once.
            retry=Retry(NoBackoff(), 0),
            # RESP2 and no CLIENT SETINFO: a connection costs no more round trips than its URL asks for.
            protocol=2,
            driver_info=None,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis_url is not a Redis URL: {error}", field="redis_url") from error
