"""Access to Redis: TLS, ACL users, and the message where access is refused."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.kvstore.index.redis_index import RedisIndex
from services.kvstore.resp.open import redis_client
from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings
from shared.errors import ConfigError, StoreUnavailable
from shared.kv_index.holders import Tier
from tests.integration.kvstore.tls_proxy import TlsProxy
from tests.integration.kvstore.workers import hashes, worker

A = worker()
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


@pytest_asyncio.fixture
async def tls(valkey_url: str, admin: Redis, tmp_path: Path) -> AsyncIterator[TlsProxy]:
    async with TlsProxy(tmp_path, valkey_url.removeprefix("unix://")) as proxy:
        yield proxy


@pytest_asyncio.fixture
async def user(admin: Redis) -> AsyncIterator[str]:
    """An ACL user that may do what the documentation says, and no more."""
    rights = ["+@read", "+@write", "+@scripting", "+@connection", "+info", "+dbsize", "+time"]
    await admin.execute_command("ACL", "SETUSER", "tandem", "on", ">s3cret", "~b:*", "~tandem:*", *rights)  # type: ignore[no-untyped-call]
    yield "tandem:s3cret"
    await admin.acl_deluser("tandem")


@needs_openssl
async def test_an_acl_user_over_tls(tls: TlsProxy, user: str) -> None:
    url = f"rediss://{user}@localhost:{tls.port}/0?ssl_ca_certs={tls.certificate}"
    client = redis_client(url, 5.0)
    index = RedisIndex(client)
    await index.start()
    await index.publish(A, Tier.DEVICE, b"".join(hashes(1500)))
    assert (await index.match(b"".join(hashes(2000)))).num_blocks == 1500
    assert (await index.stats()).num_blocks == 1500
    await index.remove(A, Tier.DEVICE, b"".join(hashes(1500)))
    assert index._redis.address == f"rediss://localhost:{tls.port}/0"
    await client.close()


@needs_openssl
async def test_a_certificate_that_nobody_vouches_for_stops_the_start(tls: TlsProxy) -> None:
    client = redis_client(f"rediss://localhost:{tls.port}", 5.0)
    with pytest.raises(ConfigError, match="certificate") as caught:
        await client.check()
    assert caught.value.field == "redis_url"
    await client.close()


@needs_openssl
async def test_a_certificate_for_another_host_stops_the_start(tls: TlsProxy) -> None:
    client = redis_client(f"rediss://127.0.0.1:{tls.port}?ssl_ca_certs={tls.certificate}", 5.0)
    with pytest.raises(ConfigError, match="127"):
        await client.check()
    await client.close()


async def test_a_wrong_password_stops_the_services_start_without_naming_it(valkey_url: str, user: str) -> None:
    server = KVStoreServer(
        KVStoreSettings(bind="127.0.0.1:0", redis_url=f"{valkey_url}?username=tandem&password=wr0ng")  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError) as caught:
        await server.start()
    assert caught.value.field == "redis_url"
    assert "WRONGPASS" in str(caught.value)
    assert "wr0ng" not in str(caught.value)


async def test_a_password_that_is_missing_stops_the_start(valkey_url: str, admin: Redis) -> None:
    await admin.config_set("requirepass", "s3cret")
    client = redis_client(valkey_url, 5.0)
    try:
        with pytest.raises(ConfigError, match="NOAUTH"):
            await client.check()
    finally:
        await admin.config_set("requirepass", "")
        await client.close()


async def test_a_redis_that_evicts_keys_stops_the_start(valkey_url: str, admin: Redis) -> None:
    await admin.config_set("maxmemory", "100mb")
    await admin.config_set("maxmemory-policy", "allkeys-lru")
    client = redis_client(valkey_url, 5.0)
    try:
        with pytest.raises(ConfigError, match="noeviction"):
            await client.check()
        await admin.config_set("maxmemory-policy", "noeviction")
        await client.check()
    finally:
        await admin.config_set("maxmemory-policy", "noeviction")
        await admin.config_set("maxmemory", "0")
        await client.close()


async def test_a_full_redis_is_unavailable_and_says_so(valkey_url: str, admin: Redis) -> None:
    client = redis_client(valkey_url, 5.0)
    index = RedisIndex(client)
    await admin.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailable, match="OOM"):
            await index.publish(A, Tier.DEVICE, b"".join(hashes(1)))
    finally:
        await admin.config_set("maxmemory", "0")
        await client.close()
    assert await admin.keys("b:*") == []
