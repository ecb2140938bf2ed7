"""The index on a real three-node cluster: the same answers, an even load, moving slots, lost nodes, clear refusals."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from services.kvstore.index.block_index import ResyncNeeded
from services.kvstore.index.redis_index import TABLE_SLOT, RedisIndex
from services.kvstore.index.sweeper import Sweeper
from services.kvstore.resp.client import RedisClient
from services.kvstore.resp.command import Command
from services.kvstore.resp.open import redis_client
from services.kvstore.resp.redis_node import RedisConnection
from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings
from shared.errors import ConfigError, InvalidRequest, StoreUnavailable
from shared.identity import WorkerRole
from shared.kv_index.client import KVStoreClient
from shared.kv_index.holders import EventStamp, Tier
from shared.kv_index.publisher import IndexPublisher
from tests.integration.kvstore.valkey_cluster import ValkeyCluster
from tests.integration.kvstore.workers import eventually, hashes, holder, worker

A, B = worker("prefill-0", 5), worker("decode-0", 7, WorkerRole.DECODE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    cluster = ValkeyCluster(tmp_path_factory.mktemp("cluster"))
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(cluster.start())
    yield cluster
    cluster.stop()


@pytest_asyncio.fixture
async def client(cluster: ValkeyCluster) -> AsyncIterator[RedisClient]:
    for port in cluster.ports:
        async with cluster.admin(port) as node:
            await node.flushall()
            await node.config_resetstat()
    client = redis_client(cluster.url, 5.0, cluster=True)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def index(client: RedisClient) -> RedisIndex:
    index = RedisIndex(client)
    await index.start()
    await index.probe()
    return index


@pytest.mark.slow
async def test_publish_match_remove_sweep_and_count(index: RedisIndex, client: RedisClient) -> None:
    chain = hashes(3000)
    joined = b"".join(chain)
    assert await index.publish(A, Tier.DEVICE, joined) == 3000
    assert await index.publish(A, Tier.DEVICE, joined) == 0
    assert await index.publish(B, Tier.HOST, b"".join(chain[:2000])) == 2000
    assert await index.remove(A, Tier.DEVICE, b"".join(chain[2500:])) == 500
    both = (holder(A), holder(B, Tier.HOST))
    assert (await index.match(joined)).blocks == (both,) * 2000 + ((holder(A),),) * 500
    assert (await index.match(b"")).num_blocks == 0
    assert (await index.stats()).num_blocks == 2500
    await index.publish(worker(A.name, 6), Tier.DEVICE, b"")
    assert (await index.match(joined)).blocks == ((holder(B, Tier.HOST),),) * 2000
    assert await Sweeper(client, interval_s=60, lease_s=60).sweep() == 2500
    assert (await index.stats()).num_blocks == 2000
    with pytest.raises(InvalidRequest, match="superseded"):
        await index.publish(A, Tier.DEVICE, joined)


async def test_the_load_is_even_although_nearly_all_prompts_share_one_system_prompt(
    index: RedisIndex, cluster: ValkeyCluster
) -> None:
    """Keys looked up and time spent by node; 90 % of prompts begin with the same 128 blocks (2,048 tokens)."""
    system, rng = hashes(128, "system"), random.Random(1)
    prompts = []
    for number in range(100):
        head = system if rng.random() < 0.9 else hashes(128, f"own {number}")
        prompts.append(b"".join(head + hashes(rng.randrange(8, 64), f"turn {number}")))
    for number, prompt in enumerate(prompts):
        await index.publish((A, B)[number % 2], Tier.DEVICE, prompt)
    for port in cluster.ports:
        async with cluster.admin(port) as node:
            await node.config_resetstat()
    for prompt in prompts:
        assert (await index.match(prompt)).num_blocks == len(prompt) // 16
    keys: Counter[int] = Counter()
    for port in cluster.ports:
        async with cluster.admin(port) as node:
            keys[port] = (await node.info("stats"))["keyspace_hits"]
    assert keys.total() >= sum(len(prompt) // 16 for prompt in prompts)
    assert max(keys.values()) <= 1.3 * keys.total() / len(cluster.ports)


async def test_a_slot_that_moves_is_followed(index: RedisIndex, cluster: ValkeyCluster) -> None:
    """A bucket's slot wanders to the next node: read when half of it is there (ASK), and used when all is (MOVED)."""
    chain = hashes(600)
    await index.publish(A, Tier.DEVICE, b"".join(chain))
    async with moving_slot(cluster, index._buckets.slots[0]) as keys:
        assert len(keys) > 2
        assert (await index.match(b"".join(chain))).blocks == ((holder(A),),) * 600
    await index.publish(B, Tier.DEVICE, b"".join(chain))
    assert (await index.match(b"".join(chain))).blocks == ((holder(A), holder(B)),) * 600


async def test_the_tables_slot_may_move_too(index: RedisIndex, cluster: ValkeyCluster) -> None:
    chain = b"".join(hashes(100))
    await index.publish(A, Tier.DEVICE, chain)
    async with moving_slot(cluster, TABLE_SLOT):
        with pytest.raises(StoreUnavailable, match=r"TRYAGAIN|ASK"):
            await index.publish(B, Tier.DEVICE, chain)
    assert (await index.match(chain)).blocks == ((holder(A),),) * 100
    await index.publish(B, Tier.DEVICE, chain)
    assert (await index.match(chain)).blocks == ((holder(A), holder(B)),) * 100


@asynccontextmanager
async def moving_slot(cluster: ValkeyCluster, slot: int) -> AsyncIterator[list[bytes]]:
    """Inside, half of the slot's keys are on the next node; behind, all of them and the slot."""
    owner = cluster.ports.index(await _owner_of(cluster, slot))
    from_port, to_port = cluster.ports[owner], cluster.ports[(owner + 1) % 3]
    clients = [redis_client(f"redis://127.0.0.1:{port}", 5.0) for port in (from_port, to_port)]
    source, target = clients
    [from_id], [to_id] = [await node.call(Command.of("CLUSTER", "MYID")) for node in clients]
    await target.call(Command.of("CLUSTER", "SETSLOT", slot, "IMPORTING", from_id))
    await source.call(Command.of("CLUSTER", "SETSLOT", slot, "MIGRATING", to_id))
    [keys] = await source.call(Command.of("CLUSTER", "GETKEYSINSLOT", slot, 1000))
    half = len(keys) // 2
    await source.call(Command.of("MIGRATE", "127.0.0.1", to_port, "", 0, 5000, "KEYS", *keys[:half]))
    try:
        yield keys
    finally:
        await source.call(Command.of("MIGRATE", "127.0.0.1", to_port, "", 0, 5000, "KEYS", *keys[half:]))
        for node in (target, source):
            await node.call(Command.of("CLUSTER", "SETSLOT", slot, "NODE", to_id))
            await node.close()


@pytest.mark.usefixtures("client")  # empties the cluster
@pytest.mark.slow
async def test_a_node_that_comes_back_empty_makes_everybody_start_over(cluster: ValkeyCluster) -> None:
    server = KVStoreServer(
        KVStoreSettings(
            bind="127.0.0.1:0",
            redis_url=cluster.url,  # type: ignore[arg-type]
            redis_cluster=True,
            redis_timeout_s=1.0,
        ),
        probe_interval_s=0.05,
    )
    await server.start()
    store = KVStoreClient(server.address, match_timeout_s=5.0, write_timeout_s=5.0)
    publisher = IndexPublisher(store, A, heartbeat_s=0.05)
    await publisher.start()
    chain = hashes(500)
    publisher.offer(chain, [])

    async def found() -> bool:
        return (await store.match(chain)).blocks == ((holder(A),),) * 500

    await eventually(found)
    owner = await _owner_of(cluster, TABLE_SLOT)
    victim = next(port for port in cluster.ports if port != owner)
    cluster.kill_node(victim)

    async def refused() -> bool:
        try:
            await store.match(chain)
        except StoreUnavailable:
            return True
        return False

    await eventually(refused)
    cluster.start_node(victim)
    await cluster.whole()
    await eventually(found)
    assert publisher.num_resyncs >= 1
    assert (await store.stats()).num_blocks == 500
    await publisher.close()
    await store.close()
    await server.close()


async def test_a_lost_marker_is_a_lost_part_of_the_index(index: RedisIndex, client: RedisClient) -> None:
    await index.publish(A, Tier.DEVICE, b"".join(hashes(3)), EventStamp(1, 0, reset=True))
    await index.probe()
    await index.publish(A, Tier.DEVICE, b"", EventStamp(2, 1))
    prefix, slot = index._buckets.prefixes[5], index._buckets.slots[5]
    await client.call(Command.of("DEL", prefix, slot=slot))
    await index.probe()
    with pytest.raises(ResyncNeeded):
        await index.publish(A, Tier.DEVICE, b"", EventStamp(3, 2))
    assert (await index.match(b"".join(hashes(3)))).num_blocks == 0


async def test_a_cluster_taken_for_one_server_and_the_other_way_round_stop_the_start(
    cluster: ValkeyCluster, valkey_url: str
) -> None:
    alone = redis_client(f"redis://127.0.0.1:{cluster.ports[0]}", 5.0)
    with pytest.raises(ConfigError, match="redis_cluster on") as caught:
        await alone.check()
    assert caught.value.field == "redis_cluster"
    await alone.close()
    many = redis_client(valkey_url, 5.0, cluster=True)
    with pytest.raises(ConfigError, match="redis_cluster off"):
        await many.check()
    await many.close()


async def test_any_seed_will_do_and_none_is_unavailable(cluster: ValkeyCluster) -> None:
    client = redis_client(f"redis://127.0.0.1:9,127.0.0.1:{cluster.ports[2]}", 5.0, cluster=True)
    await client.check()
    assert len(await client.nodes()) == 3
    await client.close()
    client = redis_client("redis://127.0.0.1:9", 1.0, cluster=True)
    with pytest.raises(StoreUnavailable):
        await client.check()
    await client.close()


async def _owner_of(cluster: ValkeyCluster, slot: int) -> int:
    """The port of the node that serves a slot."""
    client = redis_client(cluster.url, 5.0, cluster=True)
    [ranges] = await (await client.nodes())[0].ask([Command.of("CLUSTER", "SLOTS")], RedisConnection.READ)
    await client.close()
    return next(int(primary[1]) for first, last, primary, *_ in ranges if first <= slot <= last)
