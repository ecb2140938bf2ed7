"""`tandem cache` and tenants' salts on a real cluster, as an operator and its tenants meet them."""

from __future__ import annotations

import json

import grpc
import pytest

from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc, inference_pb2
from tests.e2e.running import BLOCK_SIZE, DEMO, Running, block_bytes, running
from tests.waiting import DEADLINE_S, until

HOST_BYTES = 1 << 24
TENANTS = {"a": {"share": "team"}, "b": {"share": "team"}, "keyed": {"api_keys": ["k-keyed"]}}


def prompt(num_blocks: int, seed: int = 37) -> list[int]:
    return [20 + (i * seed) % 2000 for i in range(num_blocks * BLOCK_SIZE + 1)]


async def cached(run: Running, tokens: list[int], tenant: str = "", key: str = "", **fields) -> int:
    """Prompt tokens that a request of this tenant did not compute."""
    headers = {"x-tenant": tenant} if tenant else {}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": tokens, "max_tokens": 2, "temperature": 0, **fields}
    response = await run.http.post("/v1/completions", json=body, headers=headers)
    response.raise_for_status()
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def held(run: Running, tenant: str, num_blocks: int) -> cache_pb2.CacheStats:
    """Waits until the store has that number of blocks of a tenant."""
    stub = cache_pb2_grpc.CacheServiceStub(run.channel)

    async def fitting() -> cache_pb2.CacheStats | None:
        seen = await stub.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=DEADLINE_S)
        found = sum(use.num_blocks for use in seen.nodes[0].stats.tenants if use.tenant == tenant)
        return seen if found == num_blocks else None

    return await until(fitting)


@pytest.mark.slow
async def test_tenants_share_nothing_unless_they_name_the_same_share(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__TENANTS", json.dumps({k: TENANTS[k] for k in ("a", "b")}))
    async with running(tmp_path) as run:
        tokens = prompt(6)
        assert await cached(run, tokens, "a") == 0
        assert await cached(run, tokens, "a") == 6 * BLOCK_SIZE
        assert await cached(run, tokens, "b") == 6 * BLOCK_SIZE
        assert await cached(run, tokens, "c") == 0
        assert await cached(run, tokens) == 0
        assert await cached(run, tokens, "a", cache_salt="mine") == 0
        assert await cached(run, tokens, "b", cache_salt="mine") == 6 * BLOCK_SIZE
        page = (await run.http.get("/metrics")).text
        assert 'tenant="b"' in page
        assert 'tenant="c"' not in page


async def test_stats_pin_flush_and_quotas(tmp_path, monkeypatch):
    size = block_bytes(DEMO)
    monkeypatch.setenv("TANDEM_KVSTORE_TENANT_QUOTAS", json.dumps({"small": {"host_bytes": 5 * size}}))
    spec = {"num_kv_blocks": 64, "store_host_bytes": HOST_BYTES, "prefix_fetch": "always"}
    async with running(tmp_path, **spec) as run:
        await cached(run, prompt(4), "small")
        await held(run, "small", 4)
        for seed in (41, 43, 43, 43):
            await cached(run, prompt(4, seed), "small")
        await held(run, "small", 5)
        status, out, err = await run.command("cache", "stats", "--json")
        assert (status, err) == (0, "")
        uses = json.loads(out)["nodes"][0]["stats"]["tenants"]
        use = next(use for use in uses if use["tenant"] == "small")
        assert int(use["num_blocks"]) == 5
        assert (int(use["used_bytes"]), int(use["quota_bytes"])) == (5 * size, 5 * size)
        assert int(use["num_evicted"]) > 0

        await cached(run, prompt(5, 47), "big")
        await held(run, "big", 5)
        ids = ",".join(map(str, prompt(3, 47)))
        pin = ("pin", ids, "--token-ids", "--tenant", "big", "--name", "head")
        status, out, err = await run.command("cache", *pin)
        assert (status, err) == (0, "")
        assert out == "pinned 'head': 49 tokens, 3 blocks, 3 of them stored; all are kept\n"
        status, out, _ = await run.command("cache", "pin", "be brief and kind " * 12, "--system", "--name", "system")
        assert status == 0
        assert "0 of them stored; the rest are kept once a request produces them" in out
        stub = cache_pb2_grpc.CacheServiceStub(run.channel)
        short = cache_pb2.PinPrefixRequest(name="short", tokens=inference_pb2.TokenIds(ids=[1, 2]))
        with pytest.raises(grpc.aio.AioRpcError, match="less than one block of 16"):
            await stub.PinPrefix(short, timeout=DEADLINE_S)

        status, out, _ = await run.command("cache", "flush", "--tenant", "small", "--yes")
        assert status == 0
        assert "5 blocks" in out
        assert (await held(run, "small", 0)).index.num_blocks > 0
        status, out, _ = await run.command("cache", "flush", "--yes")
        assert status == 0
        assert "index: rebuilt" in out
        assert out.count("dropped") == 3  # store-0, and both workers
        told = await held(run, "big", 0)
        assert [pin.num_held for pin in told.nodes[0].stats.pins] == [0, 0]

        # Nobody finds anything any more, and what comes from now on is kept again.
        assert await cached(run, prompt(5, 47), "big") == 0
        assert await cached(run, prompt(5, 47), "big") == 5 * BLOCK_SIZE
        status, out, _ = await run.command("cache", "unpin", "head")
        assert (status, out) == (0, "unpinned 'head': 3 blocks may be evicted\n")
        with pytest.raises(grpc.aio.AioRpcError, match="there is no pin 'head'"):
            await stub.UnpinPrefix(cache_pb2.UnpinPrefixRequest(name="head"), timeout=DEADLINE_S)
