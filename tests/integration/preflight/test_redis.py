"""Redis as the preflight sees it: real Valkey servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.kvstore.embedded import EmbeddedValkey
from services.preflight.clock import check_skew
from services.preflight.finding import Level
from services.preflight.redis_server import RedisNeed, check_redis


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path)
    await server.start()
    yield server
    await server.stop()


async def test_a_server_is_named_with_its_version_and_clock(valkey: EmbeddedValkey) -> None:
    redis, clock = await check_redis(RedisNeed(valkey.url, False, 5.0), 0.0)
    assert (redis.check, redis.level) == ("redis", Level.OK)
    assert redis.text.startswith("Valkey 9.")
    assert (clock.check, clock.level) == ("clock", Level.OK)


async def test_a_server_that_is_away_is_a_failure() -> None:
    [finding] = await check_redis(RedisNeed("redis://127.0.0.1:1", False, 0.2), 0.0)
    assert finding.level is Level.FAIL
    assert "127.0.0.1:1 is unavailable" in finding.text
    assert "NetworkPolicy" in finding.fix


async def test_a_server_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        bind = f"127.0.0.1:{free.getsockname()[1]}"
    server = EmbeddedValkey(tmp_path, bind=bind)
    checking = asyncio.create_task(check_redis(RedisNeed(f"redis://{bind}", False, 5.0), 60.0))
    await asyncio.sleep(0)  # it asks before the server starts
    await server.start()
    try:
        redis, _ = await checking
    finally:
        await server.stop()
    assert redis.level is Level.OK


async def test_a_server_that_evicts_keys_is_refused_as_the_store_would(valkey: EmbeddedValkey) -> None:
    async with Redis.from_url(valkey.url, driver_info=None) as redis:
        await redis.config_set("maxmemory", "100mb")
        await redis.config_set("maxmemory-policy", "allkeys-lru")
    [finding] = await check_redis(RedisNeed(valkey.url, False, 0.2), 60.0)  # it does not wait: no retry helps
    assert finding.level is Level.FAIL
    assert "noeviction" in finding.text


async def test_a_refused_password_is_a_failure_that_does_not_show_it(valkey: EmbeddedValkey) -> None:
    for need in (
        RedisNeed(valkey.url.replace("unix://", "unix://u:geheim@"), False, 0.2),
        RedisNeed(valkey.url.replace("unix://", "unix://u@"), False, 0.2, "geheim"),
    ):
        [finding] = await check_redis(need, 60.0)
        assert finding.level is Level.FAIL
        assert "refuses the credentials" in finding.text
        assert "geheim" not in f"{finding.text}{finding.fix}{need}"


@pytest.mark.parametrize(
    ("ahead_s", "error_s", "level"),
    [
        (0.0, 0.001, Level.OK),
        (-0.9, 0.0, Level.OK),
        (1.5, 0.1, Level.WARN),
        (1.5, 1.0, Level.OK),
        (-90.0, 0.1, Level.FAIL),
    ],
)
def test_clocks_are_judged_by_what_is_certain(ahead_s: float, error_s: float, level: Level) -> None:
    assert check_skew("there", ahead_s, error_s).level is level
