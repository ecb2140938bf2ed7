"""`tandem cache` and tenants' salts on a real cluster, as an operator and its tenants meet them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest

from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc
from tests.e2e.running import BLOCK_SIZE, DEMO, Running, block_bytes, running
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
HOST_BYTES = 1 << 24
TENANTS = {"a": {"share": "team"}, "b": {"share": "team"}, "keyed": {"api_keys": ["k-keyed"]}}


class Closing(Running):
    """Without asking the status first, which needs a key."""

    async def aclose(self) -> None:
        await self.close()


async def tandem(run: Running, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli.main", "cache", *arguments, "--target", run.cluster.grpc, cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(b"n\n"), DEADLINE_S)
    return process.returncode or 0, out.decode(), err.decode()


async def stats(run: Running) -> dict:
    status, out, err = await tandem(run, "stats", "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


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


async def held(run: Running, tenant: str, num_blocks: int) -> dict:
    """Waits until the store has so many blocks of a tenant, and then has the command say so."""
    stub = cache_pb2_grpc.CacheServiceStub(run.channel)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            seen = await stub.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=DEADLINE_S)
            if num_blocks == sum(use.num_blocks for use in seen.nodes[0].stats.tenants if use.tenant == tenant):
                break
            await asyncio.sleep(0.05)
    told = await stats(run)
    uses = told["nodes"][0]["stats"]["tenants"]
    assert num_blocks == sum(int(use["num_blocks"]) for use in uses if use["tenant"] == tenant)
    return told


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


@pytest.mark.slow
async def test_a_key_speaks_for_its_tenant_alone_and_the_cache_needs_an_admins(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__TENANTS", json.dumps({"keyed": TENANTS["keyed"]}))
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__ADMIN_KEYS", json.dumps(["k-admin"]))
    spec = ClusterSpec(
        model=DEMO, http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=tmp_path, store_host_bytes=HOST_BYTES
    )
    async with LocalCluster(spec) as cluster, contextlib.aclosing(Closing(cluster)) as run:
        run.http.headers["authorization"] = "Bearer k-keyed"
        tokens = prompt(4)
        assert await cached(run, tokens) == 0
        assert await cached(run, tokens, "keyed") == 4 * BLOCK_SIZE
        response = await run.http.post("/v1/completions", json={"prompt": tokens}, headers={"x-tenant": "other"})
        assert (response.status_code, response.json()["error"]["param"]) == (401, "x-tenant")
        status, _, err = await tandem(run, "stats", "--api-key", "k-keyed")
        said = "tandem: this needs an admin key: give it with --api-key, or in TANDEM_API_KEY\n"
        assert (status, err) == (2, said)
        status, out, _ = await tandem(run, "stats", "--api-key", "k-admin")
        assert status == 0
        assert "keyed" in out


async def test_stats_pin_flush_and_quotas(tmp_path, monkeypatch):
    size = block_bytes(DEMO)
    monkeypatch.setenv("TANDEM_KVSTORE_TENANT_QUOTAS", json.dumps({"small": {"host_bytes": 5 * size}}))
    spec = {"num_kv_blocks": 64, "store_host_bytes": HOST_BYTES, "prefix_fetch": "always"}
    async with running(tmp_path, **spec) as run:
        await cached(run, prompt(4), "small")
        await held(run, "small", 4)
        for seed in (41, 43, 43, 43):
            await cached(run, prompt(4, seed), "small")
        told = await held(run, "small", 5)
        use = next(use for use in told["nodes"][0]["stats"]["tenants"] if use["tenant"] == "small")
        assert (int(use["used_bytes"]), int(use["quota_bytes"])) == (5 * size, 5 * size)
        assert int(use["num_evicted"]) > 0

        await cached(run, prompt(5, 47), "big")
        await held(run, "big", 5)
        ids = ",".join(map(str, prompt(3, 47)))
        status, out, err = await tandem(run, "pin", ids, "--token-ids", "--tenant", "big", "--name", "head")
        assert (status, err) == (0, "")
        assert out == "pinned 'head': 49 tokens, 3 blocks, 3 of them stored; all are kept\n"
        status, out, _ = await tandem(run, "pin", "be brief and kind " * 12, "--system", "--name", "system")
        assert status == 0
        assert "0 of them stored; the rest are kept once a request produces them" in out
        status, _, err = await tandem(run, "pin", "1,2", "--token-ids")
        assert status == 2
        assert "less than one block of 16" in err
        status, out, _ = await tandem(run, "stats")
        assert status == 0
        assert "store-0" in out
        assert "head" in out

        status, _, err = await tandem(run, "flush")
        assert (status, err.endswith("nothing was dropped\n")) == (1, True)
        status, out, _ = await tandem(run, "flush", "--tenant", "small", "--yes")
        assert status == 0
        assert "5 blocks" in out
        assert int((await held(run, "small", 0))["index"]["num_blocks"]) > 0
        status, out, _ = await tandem(run, "flush", "--yes")
        assert status == 0
        assert "index: rebuilt" in out
        assert out.count("dropped") == 3  # store-0, and both workers
        told = await held(run, "big", 0)
        assert [pin["num_held"] for pin in told["nodes"][0]["stats"]["pins"]] == [0, 0]

        # Nobody finds anything any more, and what comes from now on is kept again.
        assert await cached(run, prompt(5, 47), "big") == 0
        assert await cached(run, prompt(5, 47), "big") == 5 * BLOCK_SIZE
        status, out, _ = await tandem(run, "unpin", "head")
        assert (status, out) == (0, "unpinned 'head': 3 blocks may be evicted\n")
        status, _, err = await tandem(run, "unpin", "head")
        assert (status, err) == (2, "tandem: there is no pin 'head'\n")


@pytest.mark.slow
async def test_without_store_nodes_and_without_a_cluster(tmp_path):
    async with running(tmp_path) as run:
        status, out, _ = await tandem(run, "stats")
        assert status == 0
        assert "no store nodes" in out
        status, _, err = await tandem(run, "pin", "hello")
        assert (status, "no store node is configured" in err) == (1, True)
    status, _, err = await tandem(run, "stats")
    assert status == 1
    assert "nothing listens at" in err
