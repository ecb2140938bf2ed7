"""Connections and loads of both parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loadtest.bench.router.client import Load
from loadtest.bench.router.http2 import Connection
from shared.errors import Internal


@asynccontextmanager
async def connected(target: str) -> AsyncIterator[Connection]:
    """A connection to host:port."""
    connection = await Connection.open(target)
    try:
        yield connection
    finally:
        connection.close()


def answered(load: Load) -> int:
    """How many requests; raises Internal where one failed."""
    if load.num_failed:
        raise Internal(f"{load.num_failed} requests failed, such as: {load.failure}")
    return len(load.requests)
