"""Prefill workers that keep KV at full width before decode workers that keep codes: blocks are converted on their way.

The oracle is one model over two pools: it reads a prompt into a wide one, whose rows become codes and scales by the
formula written here, and goes on from these.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from shared.identity import WorkerRole
from shared.kv.hashing import chain
from shared.kv.layout import KVFormat
from shared.model.decoder import Decoder
from tests.e2e.running import BLOCK_SIZE, DEMO, block_bytes, loads, running
from tests.e2e.stage import HOST_BYTES, Stage, prompt, staged
from tests.unit.model.paged_run import PagedSequence

WIDE = {"fp32": torch.float32, "bf16": torch.bfloat16}
CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
NUM_TOKENS = 48


@cache
def oracle(num_prompt: int, seed: int, wide: str, narrow: str) -> list[int]:
    """Greedy tokens behind `prompt(num_prompt, seed)`."""
    decoder = Decoder.load(DEMO, torch.float32, "cpu")
    tokens = prompt(num_prompt, seed)
    dtype, most = CODES[narrow]
    with torch.inference_mode():
        reading = PagedSequence(decoder, num_prompt, WIDE[wide])
        answer = [int(reading.step(tokens, num_prompt)[-1].argmax())]
        writing = PagedSequence(decoder, num_prompt + NUM_TOKENS, dtype)
        for token in range(num_prompt):
            here, there = (sequence.table[token // 4] for sequence in (reading, writing))
            rows = reading.pool.rows[here, ..., token % 4, :].float()
            peaks = rows.abs().amax(-1)
            codes = rows * (torch.full_like(peaks, most) / peaks)[..., None]
            codes = codes.round() if narrow == "int8" else codes
            writing.pool.rows.view(torch.uint8)[there, ..., token % 4, :] = codes.to(dtype).view(torch.uint8)
            writing.pool.scales[there, ..., token % 4] = peaks / torch.full_like(peaks, most)
        writing.kv_len = num_prompt
        while len(answer) < NUM_TOKENS:
            answer.append(int(writing.step(answer[-1:], writing.kv_len + 1)[-1].argmax()))
    return answer


def sent_bytes(narrow: str) -> int:
    """Of one block on its way."""
    wide = block_bytes(DEMO)
    form = KVFormat(str(CODES[narrow][0]).removeprefix("torch."), 1, 32)
    return wide * form.layer_bytes(BLOCK_SIZE) // KVFormat("float32", 1, 32).layer_bytes(BLOCK_SIZE)


@pytest.mark.parametrize(("wide", "narrow"), [("bf16", "int8"), pytest.param("fp32", "fp8", marks=pytest.mark.slow)])
async def test_tokens_are_those_of_one_worker_that_converts_the_prompt(tmp_path, wide, narrow):
    """Computed, and found in both pools, each under its own format's name."""
    expected = oracle(75, 37, wide, narrow)
    async with running(tmp_path, kv_dtype=narrow, prefill_kv_dtype=wide) as cluster:
        fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        assert await cluster.tokens(prompt(75), **fields) == expected
        status = await cluster.idle()
        assert loads(status)["decode-0"].kv_bytes_received == 5 * sent_bytes(narrow)
        kept = {worker.worker.name: worker.kv_dtype for worker in status.workers}
        names = (str(dtype).removeprefix("torch.") for dtype in (CODES[narrow][0], WIDE[wide]))
        assert kept == {"prefill-0": str(WIDE[wide]).removeprefix("torch."), "decode-0": "<".join(names)}
        answer = await cluster.complete(prompt(75), **fields)
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        # Only the last block, which is not full, is sent again.
        assert loads(await cluster.idle())["decode-0"].kv_bytes_received == 6 * sent_bytes(narrow)


async def test_peers_and_the_store_give_prompts_as_they_were_computed(tmp_path):
    """And no prefix of one format is held under the name of the other."""
    spec = {"num_prefill": 2, "store_host_bytes": HOST_BYTES, "kv_dtype": "int8", "prefill_kv_dtype": "bf16"}
    async with staged(tmp_path, **spec) as stage:
        tokens = prompt(200)
        expected = oracle(200, 37, "bf16", "int8")[:24]
        first, _ = await stage.ask(tokens, "prefill-0")
        assert first == expected
        await stage.held(tokens, 12, ["prefill-0"])
        holders = {role: await _workers(stage, tokens, role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)}
        assert holders == {WorkerRole.PREFILL: {"prefill-0"}, WorkerRole.DECODE: {"decode-0"}}
        stage.lookup.peers = None
        answer, summary = await stage.ask(tokens, "prefill-1")
        assert (answer, summary.num_peer_tokens) == (expected, 12 * BLOCK_SIZE)

        other = prompt(200, seed=41)
        stage.lookup.peers = frozenset()
        await stage.ask(other, "prefill-0")
        await stage.stored(other, 12)
        answer, summary = await stage.ask(other, "prefill-1")
        assert answer == oracle(200, 41, "bf16", "int8")[:24]
        assert (summary.num_fetched_tokens, summary.num_peer_tokens) == (12 * BLOCK_SIZE, 0)
        await stage.idle()
        assert [stage.load(link.name).num_bad_blocks for link in stage.fleet.links] == [0, 0, 0]
        assert await stage.num_bad() == 0


async def _workers(stage: Stage, tokens: list[int], role: WorkerRole) -> set[str]:
    hashes = chain(stage.fleet.hash_root("t", len(tokens), holder=role), tokens, BLOCK_SIZE)
    blocks = await stage._holders(hashes)
    return {holder.worker_name for holders in blocks for holder in holders if holder.role is not WorkerRole.STORE}


async def test_decode_workers_wait_for_a_prefill_worker_and_compute_no_prompt(tmp_path):
    spec = {"kv_dtype": "int8", "prefill_kv_dtype": "fp32"}
    async with staged(tmp_path, **spec) as stage:
        tokens = prompt(75)
        answer, record = await stage.ask(tokens, max_tokens=NUM_TOKENS)
        assert answer == oracle(75, 37, "fp32", "int8")
        assert record.prefill_worker == "prefill-0"
        stage.kill("prefill-0")
        await stage.until(lambda: not stage.fleet.prefills["prefill-0"].connected)
        assert not stage.fleet.lacks_prefill
        assert "prefill" in stage.fleet.not_ready_reason()
