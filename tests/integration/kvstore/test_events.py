"""Changes in series: losses are noticed, late ones ignored, silent workers forgotten; and the index converges."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.kvstore.embedded import EmbeddedValkey
from services.kvstore.index.block_index import ResyncNeeded
from services.kvstore.index.redis_index import RedisIndex
from services.kvstore.index.sweeper import Sweeper
from services.kvstore.resp.client import RedisClient
from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings
from shared.errors import InvalidRequest
from shared.identity import WorkerRole
from shared.kv.pool import BlockPool
from shared.kv_index.client import KVStoreClient
from shared.kv_index.holders import EventStamp, Tier
from shared.kv_index.publisher import IndexPublisher
from tests.integration.kvstore.workers import eventually, hashes, holder, worker

A, B = worker("prefill-0", 5), worker("decode-0", 7, WorkerRole.DECODE)
CHAIN = hashes(6)


def joined(first: int, end: int) -> bytes:
    return b"".join(CHAIN[first:end])


async def num_held(index: RedisIndex) -> int:
    return (await index.match(b"".join(CHAIN))).num_blocks


async def test_a_series_begins_with_a_reset_and_goes_on_without(index: RedisIndex) -> None:
    with pytest.raises(ResyncNeeded):
        await index.publish(A, Tier.DEVICE, joined(0, 1), EventStamp(1, 0))
    assert await num_held(index) == 0
    await index.publish(A, Tier.DEVICE, joined(0, 1), EventStamp(2, 0, reset=True))
    await index.publish(A, Tier.DEVICE, joined(1, 4), EventStamp(3, 2))
    await index.remove(A, Tier.DEVICE, joined(3, 4), EventStamp(4, 3))
    assert await num_held(index) == 3


async def test_a_change_whose_answer_was_lost_is_made_again_under_a_new_number(index: RedisIndex) -> None:
    await index.publish(A, Tier.DEVICE, b"", EventStamp(1, 0, reset=True))
    await index.publish(A, Tier.DEVICE, joined(0, 2), EventStamp(2, 1))
    await index.publish(A, Tier.DEVICE, joined(0, 3), EventStamp(3, 1))
    assert await num_held(index) == 3


async def test_a_late_change_cannot_undo_a_later_one(index: RedisIndex) -> None:
    await index.publish(A, Tier.DEVICE, joined(0, 2), EventStamp(1, 0, reset=True))
    await index.remove(A, Tier.DEVICE, joined(0, 2), EventStamp(3, 1))
    assert await index.publish(A, Tier.DEVICE, joined(0, 2), EventStamp(2, 1)) == 0
    assert await index.publish(A, Tier.DEVICE, joined(0, 2), EventStamp(1, 0, reset=True)) == 0
    assert await num_held(index) == 0


async def test_acknowledged_changes_that_the_index_does_not_know_are_noticed(index: RedisIndex, admin: Redis) -> None:
    await index.publish(A, Tier.DEVICE, joined(0, 1), EventStamp(1, 0, reset=True))
    await index.publish(A, Tier.DEVICE, joined(1, 2), EventStamp(2, 1))
    await admin.hset("tandem:{index}:progress", b"\x01prefill-0", "1")
    for stamp in (EventStamp(3, 2), EventStamp(4, 2)):
        with pytest.raises(ResyncNeeded):
            await index.publish(A, Tier.DEVICE, b"", stamp)
        with pytest.raises(ResyncNeeded):
            await index.remove(A, Tier.DEVICE, joined(0, 1), stamp)
    await admin.flushall()
    with pytest.raises(ResyncNeeded):
        await index.remove(A, Tier.DEVICE, joined(0, 1), EventStamp(5, 2))


async def test_starting_over_forgets_what_was_published_before_and_only_in_that_tier(
    index: RedisIndex, client: RedisClient, admin: Redis
) -> None:
    await index.publish(A, Tier.DEVICE, joined(0, 6), EventStamp(1, 0, reset=True))
    await index.publish(A, Tier.HOST, joined(0, 2), EventStamp(1, 0, reset=True))
    await index.publish(B, Tier.DEVICE, joined(0, 4))
    await index.publish(A, Tier.DEVICE, joined(0, 1), EventStamp(2, 1, reset=True))
    match = await index.match(b"".join(CHAIN))
    both = (holder(A, Tier.HOST), holder(B))
    assert match.blocks == ((*both, holder(A)), both, (holder(B),), (holder(B),))
    assert await Sweeper(client, interval_s=60, lease_s=60).sweep() == 6
    assert len(await admin.keys("b:*")) == 4


async def test_a_superseded_incarnation_cannot_start_over(index: RedisIndex) -> None:
    await index.publish(A, Tier.HOST, b"", EventStamp(1, 0, reset=True))
    await index.publish(worker(A.name, 6), Tier.DEVICE, b"", EventStamp(1, 0, reset=True))
    for tier in (Tier.HOST, Tier.DEVICE):
        with pytest.raises(InvalidRequest, match="superseded"):
            await index.publish(A, tier, joined(0, 1), EventStamp(2, 1, reset=True))


async def test_who_is_silent_for_the_whole_lease_is_forgotten_and_may_come_back(
    index: RedisIndex, client: RedisClient, admin: Redis
) -> None:
    now = 1000.0
    sweeper = Sweeper(client, interval_s=60, lease_s=60, clock=lambda: now)
    await index.publish(A, Tier.DEVICE, joined(0, 6), EventStamp(1, 0, reset=True))
    await index.publish(B, Tier.DEVICE, joined(0, 2), EventStamp(1, 0, reset=True))
    await admin.zincrby("tandem:{index}:seen", -61, b"\x01prefill-0")
    assert await sweeper.expire() == 0  # Redis answers only since now: who knows whether anybody could speak before
    now += 60
    assert await sweeper.expire() == 1
    assert (await index.match(b"".join(CHAIN))).blocks == ((holder(B),), (holder(B),))
    assert await sweeper.sweep() == 6
    with pytest.raises(ResyncNeeded):
        await index.publish(A, Tier.DEVICE, b"", EventStamp(2, 1))
    await index.publish(A, Tier.DEVICE, joined(0, 3), EventStamp(3, 1, reset=True))
    assert await num_held(index) == 3


async def test_the_index_is_what_the_pools_hold_whenever_redis_was_lost(tmp_path: Path) -> None:
    """Two real pools seal and evict at random, Redis dies twice meanwhile; in the end the index is exact."""
    redis = EmbeddedValkey(tmp_path)
    await redis.start()
    server = KVStoreServer(
        KVStoreSettings(bind="127.0.0.1:0", redis_url=redis.url),  # type: ignore[arg-type]
        probe_interval_s=0.05,
    )
    await server.start()
    client = KVStoreClient(server.address, match_timeout_s=5.0, write_timeout_s=5.0)
    pools = {A: BlockPool(40, 16), B: BlockPool(25, 16)}
    publishers = {member: IndexPublisher(client, member, heartbeat_s=0.05, max_batch=16) for member in pools}
    for publisher in publishers.values():
        await publisher.start()
    rng, known = random.Random(7), hashes(120, "pool")
    for step in range(300):
        for member, pool in pools.items():
            block_ids = pool.allocate(rng.randrange(1, 6))
            for block_id in block_ids:
                pool.seal(block_id, rng.choice(known))
            pool.release(block_ids)
            events = pool.drain_events()
            publishers[member].offer(events.sealed, events.evicted)
        if step in (100, 200):
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGKILL)
            await redis.stop()
            await redis.start()
        await asyncio.sleep(0)

    async def exact() -> bool:
        """Asked block by block: the chain of a random pool has holes."""
        for block_hash in known:
            match = await client.match([block_hash])
            found = {holder.worker_name for holders in match.blocks for holder in holders}
            if found != {member.name for member, pool in pools.items() if pool.match([block_hash])}:
                return False
        return True

    await eventually(exact)
    for publisher in publishers.values():
        await publisher.close()
    await client.close()
    await server.close()
    await redis.stop()
