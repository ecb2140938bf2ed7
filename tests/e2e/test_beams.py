"""Beam search and the best of several answers through a cluster, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.engine.sampling_params import BeamSearch
from tests.e2e.running import BLOCK_SIZE, DEMO, Running, block_bytes, loads, running
from tests.integration.engine.test_beams import NUM_TOKENS, transformers_beams

PROMPT = [20 + (i * 37) % 2000 for i in range(6 * BLOCK_SIZE + 5)]
SEARCH = BeamSearch(4, 2, 0.8)
FIELDS = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.8, "ignore_eos": True}


async def searched(run: Running) -> list[list[int]]:
    body = await run.complete(PROMPT, max_tokens=NUM_TOKENS, **FIELDS)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    return [choice["token_ids"] for choice in body["choices"]]


async def test_a_handed_over_prompt_is_sent_once_and_its_beams_are_those_of_transformers(tmp_path: Path) -> None:
    expected = transformers_beams(DEMO, PROMPT, SEARCH, [])
    async with running(tmp_path) as run:
        before = loads(await run.idle())
        assert await searched(run) == expected
        sent = 7 * block_bytes(DEMO)
        await run.until(lambda s: loads(s)["prefill-0"].kv_bytes_sent == before["prefill-0"].kv_bytes_sent + sent)
        lines = (await run.http.get("/metrics")).text.splitlines()
        [counted] = [line for line in lines if line.startswith("tandem_tokens_total{") and 'kind="output"' in line]
        assert float(counted.rpartition(" ")[2]) == SEARCH.width * NUM_TOKENS, "all that was computed"
        found = await asyncio.gather(*(searched(run) for _ in range(6)))
        assert found == [expected] * 6
        await run.idle()

        chat = {"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 8}
        answer = (await run.http.post("/v1/chat/completions", json={**chat, "use_beam_search": True, "n": 3})).json()
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3

        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 7, "logprobs": 0, "ignore_eos": True}
        every = await run.complete(n=4, **body)
        best = await run.complete(n=2, best_of=4, **body)
        means = sorted((sum(c["logprobs"]["token_logprobs"]) / 8, c["text"]) for c in every["choices"])
        assert [choice["text"] for choice in best["choices"]] == [text for _, text in reversed(means[-2:])]


async def test_a_search_whose_worker_dies_begins_anew_on_another(tmp_path: Path) -> None:
    expected = transformers_beams(DEMO, PROMPT, SEARCH, [])
    async with running(tmp_path, num_decode=2) as run:
        asked = [asyncio.create_task(searched(run)) for _ in range(8)]
        held = await run.until(lambda s: any(loads(s)[f"decode-{i}"].num_running > 0 for i in range(2)))
        busy = next(name for name, load in loads(held).items() if name.startswith("decode") and load.num_running > 0)
        run.signal(busy)
        assert await asyncio.gather(*asked) == [expected] * 8
