"""A prompt that is computed ahead of its requests, and a session whose blocks go first once it is over."""

from __future__ import annotations

from pathlib import Path

from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc, kvstore_pb2
from tandem import AsyncTandemClient
from tests.e2e.running import BLOCK_SIZE, DEMO, Running, block_bytes, running
from tests.waiting import until

NUM_BLOCKS = 10
POOL = 64


def prompt(seed: int) -> list[int]:
    """Ten full blocks and a token."""
    return [20 + (i * seed) % 2000 for i in range(NUM_BLOCKS * BLOCK_SIZE + 1)]


async def post(run: Running, path: str, tenant: str = "", **body: object) -> dict:
    response = await run.http.post(path, json=body, headers={"x-tenant": tenant} if tenant else {})
    response.raise_for_status()
    return response.json()


async def cached(run: Running, tokens: list[int], tenant: str = "") -> int:
    answer = await post(run, "/v1/completions", tenant, prompt=tokens, max_tokens=2, temperature=0)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_the_next_request_finds_a_warmed_prompt(tmp_path: Path) -> None:
    whole = NUM_BLOCKS * BLOCK_SIZE
    async with running(tmp_path) as run:
        body = {"prompt": prompt(37), "prompt_cache_key": "k", "prompt_cache_retention": "1h"}
        warmed = await post(run, "/v1/cache/warm", **body)
        assert (warmed["object"], warmed["prompt_tokens"], warmed["retained_s"]) == ("cache.warm", whole + 1, 3600.0)
        assert (warmed["cached_tokens"], warmed["computed_tokens"]) == (0, whole + 1)
        assert "choices" not in warmed
        assert await cached(run, prompt(37)) == whole
        again = await post(run, "/v1/cache/warm", prompt=prompt(37))
        assert (again["cached_tokens"], again["computed_tokens"], again["retained_s"]) == (whole, 1, 0.0)

        system = {"role": "system", "content": "Answer as the book of Genesis would. " * 8}
        warmed = await post(run, "/v1/cache/warm", messages=[system, {"role": "user", "content": "a"}])
        asked = [system, {"role": "user", "content": "In the beginning"}]
        answer = await post(run, "/v1/chat/completions", messages=asked, max_tokens=2)
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < warmed["computed_tokens"] - 2 * BLOCK_SIZE <= found < warmed["prompt_tokens"]

        async with AsyncTandemClient([run.cluster.grpc]) as client:
            by_grpc = await client.warm(prompt(41), session="s", retention="5m")
            assert (by_grpc.num_prompt_tokens, by_grpc.num_cached_tokens, by_grpc.retained_s) == (whole + 1, 0, 300.0)
            assert (await client.generate(prompt(41), max_tokens=2)).usage.num_cached_tokens == whole

        for refused, field in (
            ({"prompt": [1, 2], "stream": True}, "stream"),
            ({"prompt": [1, 2], "n": 2}, "n"),
            ({}, "prompt"),
        ):
            response = await run.http.post("/v1/cache/warm", json=refused)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_blocks_of_a_closed_session_are_evicted_before_others_of_its_tenant_alone(tmp_path: Path) -> None:
    whole = NUM_BLOCKS * BLOCK_SIZE
    retained = {"prompt_cache_retention": "1h"}
    async with running(tmp_path, num_kv_blocks=POOL) as run:
        assert await cached(run, prompt(37), "t") == 0  # the oldest, and retained by nobody
        for seed, key in ((41, "over"), (43, "lasting")):
            await post(run, "/v1/cache/warm", "t", prompt=prompt(seed), prompt_cache_key=key, **retained)
        await run.idle()
        closed = await post(run, "/v1/cache/close", "other", prompt_cache_key="over")
        assert closed == {"object": "cache.session.closed", "released_blocks": 0}
        closed = await post(run, "/v1/cache/close", "t", prompt_cache_key="over")
        assert closed["released_blocks"] == 2 * NUM_BLOCKS  # of the prefill worker's pool and the decode worker's
        assert (await post(run, "/v1/cache/close", "t", prompt_cache_key="over"))["released_blocks"] == 0
        for seed in (47, 53, 59, 61):  # the last one does not find enough blank blocks
            assert await cached(run, prompt(seed), "t") == 0
        assert await cached(run, prompt(37), "t") == whole
        assert await cached(run, prompt(41), "t") < whole
        assert await cached(run, prompt(43), "t") == whole
        async with AsyncTandemClient([run.cluster.grpc]) as client:
            await client.warm(prompt(67), session="s", retention="1h", tenant="t")
            await run.idle()
            assert await client.close_session("s", tenant="other") == 0
            assert await client.close_session("s", tenant="t") == 2 * NUM_BLOCKS
        response = await run.http.post("/v1/cache/close", json={})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_cache_key")


async def test_the_session_that_comes_back_last_gives_way_first(tmp_path: Path) -> None:
    whole = NUM_BLOCKS * BLOCK_SIZE
    async with running(tmp_path, num_kv_blocks=POOL) as run, AsyncTandemClient([run.cluster.grpc]) as client:
        await client.warm(prompt(41), session="near", retention="1h", tenant="t", next_turn_s=60.0)
        await post(run, "/v1/cache/warm", "t", prompt=prompt(43), prompt_cache_key="far", prompt_cache_retention="1h")
        await run.idle()
        for seconds, tenant in ((6000.0, "t"), (1.0, "other")):  # another tenant's session of the same name
            said = await post(run, "/v1/cache/expect", tenant, prompt_cache_key="far", next_turn_s=seconds)
            assert said == {"object": "cache.session.expected", "next_turn_s": seconds}
        long = [20 + (i * 47) % 2000 for i in range((POOL - 2 * NUM_BLOCKS + 4) * BLOCK_SIZE)]
        assert await cached(run, long, "t") == 0
        assert await cached(run, prompt(41), "t") == whole
        assert await cached(run, prompt(43), "t") < whole
        await client.expect_session("far", 2.0, tenant="t")
        for body, field in (
            ({"next_turn_s": 1}, "prompt_cache_key"),
            ({"prompt_cache_key": "far"}, "next_turn_s"),
            ({"prompt_cache_key": "far", "next_turn_s": 86_401}, "next_turn_s"),
        ):
            response = await run.http.post("/v1/cache/expect", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_a_store_node_retains_what_requests_say_beyond_a_stream_of_others(tmp_path: Path) -> None:
    whole = NUM_BLOCKS * BLOCK_SIZE
    room = 3 * NUM_BLOCKS * block_bytes(DEMO)
    async with running(tmp_path, num_kv_blocks=POOL, store_host_bytes=room) as run:
        cache = cache_pb2_grpc.CacheServiceStub(run.channel)

        async def tier() -> kvstore_pb2.TierStats | None:
            stats = await cache.GetCacheStats(cache_pb2.GetCacheStatsRequest())
            return next((tier for node in stats.nodes for tier in node.stats.tiers), None)

        async def stored(least: int) -> kvstore_pb2.TierStats:
            async def enough() -> kvstore_pb2.TierStats | None:
                found = await tier()
                return found if found is not None and found.num_stored >= least else None

            return await until(enough)

        await post(run, "/v1/cache/warm", "t", prompt=prompt(37), prompt_cache_retention="1h")
        retained = (await stored(NUM_BLOCKS)).retained_bytes
        assert retained == NUM_BLOCKS * block_bytes(DEMO)
        seeds = [41, 43, 47, 53, 59, 61, 67, 71]
        for seed in seeds:
            for _ in range(2):  # a full tier takes what is offered again
                assert (await cached(run, prompt(seed), "t")) in (0, whole)
        await stored(5 * NUM_BLOCKS)
        found = await tier()
        assert found is not None
        assert found.num_evicted > 0
        assert found.retained_bytes == retained
