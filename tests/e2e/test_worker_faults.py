"""Workers are drained, killed and stopped under streams that run: every stream gives what it gives undisturbed."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.running import running
from tests.e2e.streams import prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_without_its_only_prefill_worker_the_decode_worker_computes_prompts(tmp_path):
    """The router knows of the loss before they come."""
    async with running(tmp_path) as cluster:
        expected = [await cluster.tokens(prompt(n), max_tokens=20) for n in range(5)]
        cluster.signal("prefill-0")
        lost = await cluster.until(lambda status: not status.ready)
        assert "no prefill worker is ready" in lost.not_ready_reason
        assert (await cluster.http.get("/readyz")).status_code == 503
        found = await asyncio.gather(*(cluster.tokens(prompt(n), max_tokens=20) for n in range(5)))
        assert list(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "fp8"])
async def test_disaggregated_is_collocated_is_cached(tmp_path, kv_dtype):
    fields = {"max_tokens": 64, "ignore_eos": True}
    async with running(tmp_path / "collocated", mode="collocated", num_prefill=0, kv_dtype=kv_dtype) as cluster:
        expected = await cluster.tokens(prompt(0, 75), **fields)
    async with running(tmp_path / "two", num_prefill=2, num_decode=2, kv_dtype=kv_dtype) as cluster:
        results = await asyncio.gather(*(cluster.tokens(prompt(0, 75), **fields) for _ in range(6)))
        assert results == [expected] * 6
        response = await cluster.complete(prompt(0, 75), **fields)
        assert response["choices"][0]["token_ids"] == expected
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
