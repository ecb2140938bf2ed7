"""Turns of a conversation that routers keep go where its KV lies."""

from __future__ import annotations

import openai
import pytest

from shared.kv.hashing import chain, root_hash
from shared.kv.layout import LAYOUT_VERSION
from shared.kv_index.client import KVStoreClient
from shared.model.weights.loader import fingerprint
from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc
from tests.e2e.running import BLOCK_SIZE, DEMO, running
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow
NUM_TURNS = 4


async def test_each_turn_is_placed_where_the_last_one_lies_and_hits_all_that_it_left(tmp_path):
    async with running(tmp_path, num_prefill=2, num_decode=2) as cluster:
        router = openai.AsyncOpenAI(
            base_url=f"http://{cluster.cluster.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )
        cache = cache_pb2_grpc.CacheServiceStub(cluster.channel)
        index = KVStoreClient(cluster.kvstore_address, match_timeout_s=DEADLINE_S)
        root = root_hash(fingerprint(DEMO, "float32"), "float32", LAYOUT_VERSION, salt="default")
        last, places, messages = None, [], []
        for turn in range(NUM_TURNS):
            text = f"Turn {turn}: and it came to pass in those days, that Noah spake unto the people of the land."
            messages.append({"role": "user", "content": text})
            response = await router.responses.create(
                model="demo",
                input=text,
                temperature=0,
                max_output_tokens=24,
                previous_response_id=last.id if last is not None else None,
            )
            page = (await cluster.http.get("/status/requests")).json()
            rows = {row["request_id"]: row for row in page["requests"]}
            row = rows[response.id.removeprefix("resp_")]
            places.append((row["prefill_worker"], row["decode_worker"]))
            if last is not None:
                hit, before = response.usage.input_tokens_details.cached_tokens, last.usage.input_tokens
                assert hit >= (before // BLOCK_SIZE - 1) * BLOCK_SIZE > 0
            last = response
            prompt = (await cluster.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
            assert len(prompt) == response.usage.input_tokens
            messages.append({"role": "assistant", "content": response.output_text})
            num_blocks = (response.usage.total_tokens - 1) // BLOCK_SIZE
            hashes = chain(root, prompt[:-1], BLOCK_SIZE)

            async def told(num_blocks=num_blocks, hashes=hashes, place=places[-1]):
                stats = await cache.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=DEADLINE_S)
                held = (await index.match(hashes)).blocks
                return (
                    stats.index.num_blocks >= num_blocks
                    and len(held) == len(hashes)
                    and all({holder.worker_name for holder in holders}.issuperset(place) for holders in held)
                )

            await until(told)  # both workers have told the index what they keep
            await cluster.idle()  # no load of this turn speaks against its place
        assert len(set(places)) == 1, places
        await index.close()
        await router.close()
