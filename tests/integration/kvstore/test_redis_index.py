"""RedisIndex on a real server: what it answers, what that costs, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.kvstore.embedded import EmbeddedValkey
from services.kvstore.index.redis_index import SCRIPT_HASHES, RedisIndex
from services.kvstore.index.sweeper import Sweeper
from services.kvstore.resp.client import RedisClient, SingleRedis
from services.kvstore.resp.command import Command
from services.kvstore.resp.open import redis_client
from services.kvstore.resp.redis_url import RedisAddress
from shared.errors import ConfigError, InvalidRequest, StoreUnavailable
from shared.identity import WorkerRole
from shared.kv_index.holders import Tier
from tests.integration.kvstore.workers import hashes, holder, worker
from tests.waiting import DEADLINE_S

A, B = worker("prefill-0", 2**64 - 1), worker("decode-0", 7, WorkerRole.DECODE)


async def block_values(admin: Redis) -> dict[bytes, bytes]:
    return {key: await admin.get(key) for key in await admin.keys("b:*")}  # type: ignore[misc]


@pytest.mark.parametrize("num_blocks", [1, 512, 5000])
async def test_match_is_one_round_trip_whatever_the_length(index: RedisIndex, admin: Redis, num_blocks: int) -> None:
    chain = b"".join(hashes(num_blocks))
    await index.publish(A, Tier.DEVICE, chain)
    await index.match(chain)  # reads the holder table
    await admin.config_resetstat()
    assert (await index.match(chain)).num_blocks == num_blocks
    commands = await admin.info("commandstats")
    commands.pop("cmdstat_config|resetstat")
    assert {name: stats["calls"] for name, stats in commands.items()} == {"cmdstat_mget": 1}


async def test_publish_is_one_call_a_thousand_blocks(index: RedisIndex, admin: Redis) -> None:
    await index.publish(A, Tier.DEVICE, b"")  # the server knows the script now
    await admin.config_resetstat()
    await index.publish(A, Tier.DEVICE, b"".join(hashes(2 * SCRIPT_HASHES + 1)))
    assert (await admin.info("commandstats"))["cmdstat_evalsha"]["calls"] == 4


async def test_publishing_again_changes_no_value(index: RedisIndex, admin: Redis) -> None:
    chain = b"".join(hashes(300))
    assert await index.publish(A, Tier.DEVICE, chain) == 300
    assert await index.publish(B, Tier.DEVICE, chain) == 300
    before = await block_values(admin)
    for _ in range(3):
        assert await index.publish(A, Tier.DEVICE, chain) == 0
        assert await index.publish(A, Tier.DEVICE, chain + chain) == 0
    assert await block_values(admin) == before
    assert {len(value) for value in before.values()} == {8}


async def test_records_are_compared_whole_not_by_bytes_that_happen_to_match(index: RedisIndex, admin: Redis) -> None:
    """Two neighbours' ids, (1, 0, 0, 5)(0, 0, 6, 0), contain the third's at an odd place."""
    [block] = hashes(1)
    fleet = [worker(f"w{i}", i + 1) for i in range(3)]
    for member, holder_id in zip(fleet, (0x05000001, 0x00060000, 0x00000500), strict=True):
        await admin.hset("tandem:{index}:holders", "next", str(holder_id - 1))
        assert await index.publish(member, Tier.DEVICE, block) == 1
    assert await block_values(admin) == {b"b:" + block: bytes([1, 0, 0, 5, 0, 0, 6, 0, 0, 5, 0, 0])}
    assert await index.remove(fleet[2], Tier.DEVICE, block) == 1
    assert (await index.match(block)).blocks == ((holder(fleet[0]), holder(fleet[1])),)


async def test_a_sweep_prunes_the_dead_and_only_them(index: RedisIndex, client: RedisClient, admin: Redis) -> None:
    shared, alone = hashes(700), hashes(700, seed="alone")
    await index.publish(worker("w", 1), Tier.DEVICE, b"".join(shared + alone))
    await index.publish(A, Tier.DEVICE, b"".join(shared))
    sweeper = Sweeper(client, interval_s=60, lease_s=60)
    assert await sweeper.sweep() == 0
    await index.publish(worker("w", 2), Tier.DEVICE, b"".join(shared[:1]))
    assert await sweeper.sweep() == 1400
    values = await block_values(admin)
    assert len(values) == 700
    assert sorted(len(value) for value in values.values()) == [4] * 699 + [8]
    assert (await index.match(b"".join(shared[:2]))).blocks == ((holder(A), holder(worker("w", 2))), (holder(A),))
    assert await sweeper.sweep() == 0
    with pytest.raises(InvalidRequest, match="superseded"):
        await index.publish(worker("w", 1), Tier.DEVICE, b"".join(alone))


async def test_a_sweep_passes_over_a_damaged_value(index: RedisIndex, client: RedisClient, admin: Redis) -> None:
    blocks, [damaged] = hashes(5), hashes(1, seed="damaged")
    await index.publish(worker("w", 1), Tier.DEVICE, b"".join(blocks))
    await index.publish(worker("w", 2), Tier.DEVICE, blocks[0])
    await admin.set(b"b:" + damaged, b"abc")
    assert await Sweeper(client, interval_s=60, lease_s=60).sweep() == 5


async def test_a_sweep_does_not_touch_an_index_that_was_emptied_meanwhile(
    index: RedisIndex, valkey_url: str, admin: Redis
) -> None:
    """Ids of an emptied index are new ones: those that were dead are nobody's."""
    chain = b"".join(hashes(3))

    class EmptiedBeforeThePruning(SingleRedis):
        async def call(self, *commands: Command, **options: Any) -> list[Any]:
            if any(b"removed" in (command.source or b"") for command in commands):
                await admin.flushall()
                await index.publish(A, Tier.DEVICE, chain)
            return await super().call(*commands, **options)

    await index.publish(worker("w", 1), Tier.DEVICE, chain)
    await index.publish(worker("w", 2), Tier.DEVICE, chain)
    client = EmptiedBeforeThePruning(RedisAddress.parse(valkey_url), 5.0)
    assert await Sweeper(client, interval_s=60, lease_s=60).sweep() == 0
    assert (await index.match(chain)).blocks == ((holder(A),),) * 3
    await client.close()


async def test_holder_ids_of_an_emptied_index_are_not_mistaken_for_its_successors(
    index: RedisIndex, admin: Redis
) -> None:
    [block] = hashes(1)
    await index.publish(A, Tier.DEVICE, block)
    assert (await index.match(block)).blocks == ((holder(A),),)
    await admin.flushall()
    await index.publish(B, Tier.DEVICE, block)
    assert (await index.match(block)).blocks == ((holder(B),),)


async def test_concurrent_publishers_of_the_same_blocks_lose_nothing(valkey_url: str, admin: Redis) -> None:
    chain, extra = hashes(200), hashes(200, seed="extra")
    clients = [redis_client(valkey_url, 5.0) for _ in range(4)]
    fleet = [worker(f"w{i}", i + 1) for i in range(8)]

    async def run(number: int) -> None:
        mine, index = fleet[number], RedisIndex(clients[number % 4])
        for start in range(0, 200, 40):
            await asyncio.gather(
                index.publish(mine, Tier.DEVICE, b"".join(chain[start : start + 40])),
                index.publish(mine, Tier.HOST, b"".join(extra[start : start + 40])),
            )
            await index.remove(mine, Tier.HOST, b"".join(extra[start : start + 20]))

    await asyncio.gather(*(run(number) for number in range(8)))
    values = await block_values(admin)
    assert sorted(len(value) for value in values.values()) == [8 * 4] * 300
    match = await RedisIndex(clients[0]).match(b"".join(chain))
    assert [set(holders) for holders in match.blocks] == [{holder(member) for member in fleet}] * 200
    for client in clients:
        await client.close()


async def test_a_table_that_begins_between_the_two_reads_of_the_stats_is_no_block(
    index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = index._redis.nodes

    class Late:
        """A node behind whose answer a worker registers."""

        def __init__(self, node: Any) -> None:
            self._node = node

        def __getattr__(self, name: str) -> Any:
            return getattr(self._node, name)

        async def ask(self, *what: Any) -> Any:
            answer = await self._node.ask(*what)
            monkeypatch.setattr(index._redis, "nodes", nodes)
            await index.publish(A, Tier.DEVICE, b"")
            return answer

    async def then_published() -> Any:
        return [Late(node) for node in await nodes()]

    monkeypatch.setattr(index._redis, "nodes", then_published)
    assert (await index.stats()).num_blocks == 0


@pytest.mark.parametrize(("in_url", "beside"), [("&password=s3cret", ""), ("", "s3cret")])
async def test_stats_count_blocks_and_hide_credentials(
    valkey_url: str, index: RedisIndex, admin: Redis, in_url: str, beside: str
) -> None:
    await admin.acl_setuser("tandem", True, passwords=["+s3cret"], keys=["b:*", "tandem:*"], categories=["+@all"])
    client = redis_client(f"{valkey_url}?username=tandem{in_url}", 5.0, password=beside)
    mine = RedisIndex(client)
    await mine.start()
    await mine.publish(A, Tier.DEVICE, b"".join(hashes(5)))
    stats = await mine.stats()
    assert stats.num_blocks == 5
    assert stats.index_bytes > 100_000
    assert stats.address == valkey_url
    await client.close()


async def test_refused_credentials_are_a_config_error_without_the_password(valkey_url: str, admin: Redis) -> None:
    client = redis_client(f"{valkey_url}?username=nobody&password=s3cret", 5.0)
    with pytest.raises(ConfigError) as caught:
        await RedisIndex(client).start()
    assert caught.value.field == "redis_url"
    assert "s3cret" not in str(caught.value)
    await client.close()


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", "redis://user:s3cret@host:port", ""])
def test_an_url_that_is_none_is_refused_without_naming_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        redis_client(url, 1.0)
    assert caught.value.field == "redis_url"
    assert "s3cret" not in str(caught.value)


async def test_a_killed_redis_is_unavailable_at_once_and_back_after_a_restart(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    await server.start()
    client = redis_client(server.url, 4 * DEADLINE_S)
    index = RedisIndex(client)
    chain = b"".join(hashes(3))
    await index.publish(A, Tier.DEVICE, chain)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await index.match(chain)
        assert time.monotonic() - started < DEADLINE_S
    await server.stop()
    await server.start()
    assert (await index.match(chain)).num_blocks == 0  # nothing is kept on disk
    assert await index.publish(A, Tier.DEVICE, chain) == 3
    assert (await index.match(chain)).num_blocks == 3
    await client.close()
    await server.stop()


async def test_a_hung_redis_is_unavailable_after_the_timeout(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    await server.start()
    client = redis_client(server.url, 1.0)
    index = RedisIndex(client)
    await index.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"(?<![\d.])1 s|[Tt]imeout"):
            await index.match(hashes(1)[0])
        with pytest.raises(StoreUnavailable):
            await index.publish(A, Tier.DEVICE, hashes(1)[0])
        assert time.monotonic() - started < DEADLINE_S
    finally:
        os.kill(server.pid, signal.SIGCONT)
    client_after = redis_client(server.url, 5.0)
    assert await RedisIndex(client_after).publish(A, Tier.DEVICE, hashes(1)[0]) in (0, 1)
    await client.close()
    await client_after.close()
    await server.stop()
