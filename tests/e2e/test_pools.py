"""Clusters of other shapes give the same tokens, and survive the loss of a worker."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.e2e.running import DEMO, running

PROMPT = [20 + (i * 37) % 2000 for i in range(75)]
FIELDS = {"max_tokens": 64, "ignore_eos": True}


async def expected_tokens(tmp_path, model=DEMO) -> list[int]:
    async with running(tmp_path / "collocated", model, mode="collocated", num_prefill=0) as cluster:
        return await cluster.tokens(PROMPT, **FIELDS)


@pytest.mark.slow
async def test_disaggregated_is_collocated_is_cached(tmp_path):
    expected = await expected_tokens(tmp_path)
    async with running(tmp_path / "two", num_prefill=2, num_decode=2) as cluster:
        results = await asyncio.gather(*(cluster.tokens(PROMPT, **FIELDS) for _ in range(6)))
        assert results == [expected] * 6
        response = await cluster.complete(PROMPT, **FIELDS)
        assert response["choices"][0]["token_ids"] == expected
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


@pytest.mark.slow
async def test_kv_in_bf16_gives_the_same_tokens_by_either_mode(tmp_path):
    formats = {"dtype": "fp32", "kv_dtype": "bf16"}
    async with running(tmp_path / "collocated", mode="collocated", num_prefill=0, **formats) as cluster:
        expected = await cluster.tokens(PROMPT, **FIELDS)
    async with running(tmp_path / "disaggregated", **formats) as cluster:
        for _ in range(2):
            assert await cluster.tokens(PROMPT, **FIELDS) == expected


async def test_a_decode_worker_killed_in_mid_answer_costs_no_token(tmp_path):
    fields = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    async with running(tmp_path, num_decode=2) as cluster:
        expected = await cluster.tokens(PROMPT, **fields)
        body = {"prompt": PROMPT, "stream": True, "return_token_ids": True, **fields}
        tokens: list[int] = []
        killed = False
        async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                tokens += _token_ids(line)
                if len(tokens) >= 20 and not killed:
                    killed = True
                    status = await cluster.status()
                    busy = [w for w in status.workers if w.num_requests and w.worker.name.startswith("decode")]
                    os.kill(cluster.cluster.children[busy[0].worker.name].pid, signal.SIGKILL)
        assert killed
        assert tokens == expected
        assert (await cluster.http.get("/readyz")).status_code == 200


async def test_without_its_only_prefill_worker_the_decode_worker_computes_prompts(tmp_path):
    async with running(tmp_path) as cluster:
        expected = await cluster.tokens(PROMPT, max_tokens=8)
        os.kill(cluster.cluster.children["prefill-0"].pid, signal.SIGKILL)
        await cluster.until(lambda status: not status.ready)
        assert (await cluster.http.get("/readyz")).status_code == 503
        assert await cluster.tokens(PROMPT, max_tokens=8) == expected


def _token_ids(line: str) -> list[int]:
    import json

    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event
    return [token for choice in event["choices"] for token in choice.get("token_ids") or []]
