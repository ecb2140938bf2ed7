"""One real Valkey server for the folder's tests, emptied before each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.kvstore.embedded import EmbeddedValkey
from services.kvstore.index.redis_index import RedisIndex
from services.kvstore.resp.client import RedisClient
from services.kvstore.resp.open import redis_client


@pytest.fixture(scope="package")
def valkey_url() -> Iterator[str]:
    server = EmbeddedValkey()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(server.start())
        yield server.url
        runner.run(server.stop())


@pytest_asyncio.fixture
async def admin(valkey_url: str) -> AsyncIterator[Redis]:
    """A plain client that sees what is really stored; the server is empty when a test begins."""
    async with Redis.from_url(valkey_url, protocol=2, driver_info=None) as redis:
        await redis.flushall()
        await redis.config_resetstat()
        yield redis


@pytest_asyncio.fixture
async def client(valkey_url: str, admin: Redis) -> AsyncIterator[RedisClient]:
    client = redis_client(valkey_url, 5.0)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def index(client: RedisClient) -> AsyncIterator[RedisIndex]:
    index = RedisIndex(client)
    await index.start()
    yield index
    await index.close()
