"""What a cluster answers does not depend on its pools, on encryption, or on a device that only takes its time."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.worker.engine_parts import TIMED_ANSWER
from shared.model.text.tokenizer import Tokenizer
from tests.e2e.running import BLOCK_SIZE, DEMO, block_bytes, loads, running
from tests.e2e.stage import HOST_BYTES, prompt, staged


async def _answers(folder, encryption: str) -> list[tuple[list[int], int]]:
    """Tokens, and the prompt's tokens that were fetched: computed, from a peer, from the store node."""
    spec = {"num_prefill": 2, "store_host_bytes": HOST_BYTES, "block_encryption": encryption}
    async with staged(folder, **spec) as stage:
        tokens = prompt(200)
        answers = [await stage.ask(tokens, "prefill-0")]
        await stage.held(tokens, 12, ["prefill-0"])
        stage.lookup.peers = frozenset({"prefill-0"})
        answers.append(await stage.ask(tokens, "prefill-1"))
        await stage.stored(tokens, 12)
        stage.lookup.peers = frozenset()
        other = prompt(200, seed=41)
        await stage.ask(other, "prefill-0")
        await stage.stored(other, 12)
        answers.append(await stage.ask(other, "prefill-1"))
        await stage.idle()
        assert [stage.load(link.name).num_bad_blocks for link in stage.fleet.links] == [0, 0, 0]
        assert await stage.num_bad() == 0
        assert stage.fleet.block_encryption == encryption
        return [(answer, summary.num_fetched_tokens) for answer, summary in answers]


@pytest.mark.slow
async def test_the_tokens_are_those_of_a_cluster_without_encryption(tmp_path):
    plain = await _answers(tmp_path / "plain", "none")
    assert [fetched for _, fetched in plain] == [0, 12 * BLOCK_SIZE, 12 * BLOCK_SIZE]
    assert await _answers(tmp_path / "encrypted", "aes-gcm") == plain


TIMES = {"fixed_s": 1e-3, "read_s": 2e-3, "token_s": 1e-5, "sequence_s": 0.0, "kv_s": 1e-8, "attention_s": 1e-9}
PROMPT = list(range(20, 120))
NUM_TOKENS = 40
NUM_PROMPT_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)


@pytest.mark.slow
async def test_an_answer_has_every_token_and_its_blocks_cross_the_pools(tmp_path):
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"step_times": TIMES}))
    answer = Tokenizer.load(DEMO).encode(TIMED_ANSWER)
    async with running(tmp_path, device=f"timed:{times}") as cluster:
        found = await cluster.tokens(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert found == [answer[(len(PROMPT) + i) % len(answer)] for i in range(NUM_TOKENS)]
        await cluster.until(
            lambda status: loads(status)["decode-0"].kv_bytes_received == NUM_PROMPT_BLOCKS * block_bytes(DEMO)
        )


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "fp8"])
async def test_disaggregated_is_collocated_is_cached(tmp_path, kv_dtype):
    fields = {"max_tokens": 64, "ignore_eos": True}
    async with running(tmp_path / "collocated", mode="collocated", num_prefill=0, kv_dtype=kv_dtype) as cluster:
        expected = await cluster.tokens(prompt(75), **fields)
    async with running(tmp_path / "two", num_prefill=2, num_decode=2, kv_dtype=kv_dtype) as cluster:
        results = await asyncio.gather(*(cluster.tokens(prompt(75), **fields) for _ in range(6)))
        assert results == [expected] * 6
        response = await cluster.complete(prompt(75), **fields)
        assert response["choices"][0]["token_ids"] == expected
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


async def _num_packed(cluster) -> float:
    """Blocks that the prefill worker has sent packed."""
    page = (await cluster.http.get(f"http://{cluster.cluster.metrics['prefill-0']}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("tandem_transfer_packed_blocks_total")]
    assert len(lines) == 1, lines
    return float(lines[0].split()[-1])


@pytest.mark.slow
async def test_packed_hand_offs_change_no_token(tmp_path, monkeypatch):
    fields = {"max_tokens": 32, "ignore_eos": True}
    async with running(tmp_path / "plain", kv_dtype="bf16") as cluster:
        expected = await cluster.tokens(prompt(75), **fields)
        assert await _num_packed(cluster) == 0
    monkeypatch.setenv("TANDEM_WORKER_BLOCK_COMPRESSION", "on")
    async with running(tmp_path / "packed", kv_dtype="bf16") as cluster:
        assert await cluster.tokens(prompt(75), **fields) == expected
        assert await _num_packed(cluster) >= 75 // BLOCK_SIZE
