"""A disk tier that was restarted tells the index what it kept, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.disk import DiskTier
from shared.kv_index.client import KVStoreClient
from shared.kv_index.holders import Tier
from shared.kv_index.publisher import IndexPublisher
from tests.integration.kvstore.workers import eventually, hashes, holder, worker

BLOCK = bytes(range(256))
CHAIN = hashes(6)


@pytest.mark.usefixtures("admin")
async def test_a_restarted_disk_tier_is_published_anew(valkey_url: str, admin: Redis, tmp_path: Path) -> None:
    server = KVStoreServer(KVStoreSettings(bind="127.0.0.1:0", redis_url=valkey_url))  # type: ignore[arg-type]
    await server.start()
    client = KVStoreClient(server.address, match_timeout_s=5.0, write_timeout_s=5.0)
    for incarnation in (1, 2):
        store = worker("store-0", incarnation)
        tier = DiskTier(tmp_path, 1 << 20, len(BLOCK))
        tier.start()
        if incarnation == 1:
            for block_hash in CHAIN[:5]:
                tier.put(block_hash, memoryview(BLOCK), block_checksum(memoryview(BLOCK)))
        else:
            tier._path(CHAIN[4]).write_bytes(b"damaged")
            assert tier.read(CHAIN[4], memoryview(bytearray(len(BLOCK)))) is None
        publisher = IndexPublisher(client, store, tier=Tier.DISK)
        await publisher.start()
        events = tier.drain_events()
        publisher.offer(events.sealed, events.evicted)
        expected = ((holder(store, Tier.DISK),),) * (6 - incarnation)

        async def found(expected=expected) -> bool:
            return (await client.match(CHAIN)).blocks == expected

        await eventually(found)
        await publisher.close()
        tier.close()
    await client.close()
    await server.close()
