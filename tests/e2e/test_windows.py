"""Models with windows, or with states, through a cluster: the tokens of transformers by every way a prefix can come,
and after a worker was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from tests.e2e.running import BLOCK_SIZE, DEMO, PatientCommands
from tests.e2e.stage import HOST_BYTES, Stage, prompt, staged
from tests.integration.engine.families import OWN_ROPES, STATES, write_family
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.integration.engine.test_kv_groups import in_chunks

NUM_TOKENS = 24
WINDOW = 21
TOKENS = prompt(12 * BLOCK_SIZE + 8)
FAMILIES = {
    "gpt-oss": (
        "GptOssForCausalLM", ["sliding_attention", "full_attention"],
        {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": True, "rms_norm_eps": 1e-5},
    ),
    "gemma3": (
        "Gemma3ForCausalLM", ["sliding_attention", "sliding_attention", "full_attention"],
        {"query_pre_attn_scalar": 20, "rope_parameters": OWN_ROPES},
    ),
    "qwen3-next": (STATES["qwen3-next"][0], ["linear_attention", "full_attention"], STATES["qwen3-next"][1]),
    "kimi-linear": (STATES["kimi-linear"][0], ["linear_attention", "full_attention"], STATES["kimi-linear"][1]),
}  # fmt: skip
FAMILIES_IN_TURN = [
    "gpt-oss",
    "qwen3-next",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3", "kimi-linear")),
]


def write_model(folder: Path, family: str) -> Path:
    architecture, kinds, extra = FAMILIES[family]
    write_random_checkpoint(
        folder, architecture, vocab_size=2048, hidden_size=64, intermediate_size=96, num_layers=len(kinds),
        num_heads=4, num_kv_heads=4 if family == "kimi-linear" else 2, head_dim=16, tokenizer_from=DEMO,
        extra_config={"layer_types": kinds, "sliding_window": WINDOW, **extra},
    )  # fmt: skip
    return folder


def sent_blocks(stage: Stage, model: Path, name: str) -> float:
    layout = load_config(model).block_layout(BLOCK_SIZE, "float32", grouped=True)
    return stage.load(name).kv_bytes_sent / layout.block_bytes


@pytest.mark.parametrize("family", FAMILIES_IN_TURN)
async def test_handed_over_stored_and_cached_prefixes_give_the_tokens_of_transformers(tmp_path: Path, family: str):
    model = write_model(tmp_path / "model", family)
    groups = load_config(model).block_layout(BLOCK_SIZE, "float32", grouped=True).groups
    expected = transformers_greedy(model, TOKENS, NUM_TOKENS)
    async with staged(tmp_path / "run", model=model, num_prefill=2, store_host_bytes=HOST_BYTES) as stage:
        handed_over, summary = await stage.ask(TOKENS, "prefill-0")
        assert handed_over == expected
        assert summary.num_cached_tokens == 0
        await stage.stored(TOKENS, 12)
        await stage.idle()
        kept, stored = groups.seen_by_next(len(TOKENS)), groups.seen_behind(12)
        assert sent_blocks(stage, model, "prefill-0") == len(kept) + len(stored) < 2 * 13 * groups.size
        fetched, summary = await stage.ask(TOKENS, "prefill-1")
        assert fetched == expected
        assert summary.num_cached_tokens == summary.num_fetched_tokens == 12 * BLOCK_SIZE
        cached, summary = await stage.ask(TOKENS, "prefill-1")
        assert cached == expected
        assert (summary.num_cached_tokens, summary.num_fetched_tokens) == (12 * BLOCK_SIZE, 0)
        hits = await stage.lookup.hits(TOKENS, "t", len(TOKENS))
        # The decode worker has what the token behind the prompt sees, and so not all that one before it would.
        assert hits.local == dict.fromkeys(("prefill-0", "prefill-1"), 12 * BLOCK_SIZE)
        assert hits.store == 12 * BLOCK_SIZE
        assert await stage.num_bad() == 0


class ShortSteps(PatientCommands):
    """Prompts are computed in steps of a few blocks."""

    def worker(self, plan, kvstore):
        return [*super().worker(plan, kvstore), "--max-num-batched-tokens", str(16 * BLOCK_SIZE)]


async def test_a_prompt_of_several_pools_is_answered_where_all_layers_see_a_window(tmp_path: Path):
    """Router and workers count the window, and a step's tokens: 40 blocks hold 640 tokens of a dense model."""
    sizes = {"vocab_size": 2048, "max_position_embeddings": 2048, "extra_config": {"sliding_window": WINDOW}}
    model = write_family(tmp_path / "model", "MistralForCausalLM", tokenizer_from=DEMO, **sizes)
    tokens = prompt(1200, seed=41)
    expected = in_chunks(model, tokens, NUM_TOKENS)
    async with staged(tmp_path / "run", ShortSteps, model=model, num_kv_blocks=40) as stage:
        asking = [asyncio.create_task(stage.ask(tokens, tenant=f"t{number}")) for number in range(2)]
        assert [answer for answer, _ in await asyncio.gather(*asking)] == [expected] * 2
        await stage.idle()


class Holding(PatientCommands):
    """prefill-0 can be told to stand still in its next hand-off."""

    def worker(self, plan, kvstore):
        command = [*super().worker(plan, kvstore), "--max-num-batched-tokens", str(4 * BLOCK_SIZE)]
        return [*command, "--failpoints", "ucx.send=hang@6"] if plan.name == "prefill-0" else command


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_killed_sender_and_a_killed_decode_worker_cost_no_token(tmp_path: Path, family: str):
    model = write_model(tmp_path / "model", family)
    expected = transformers_greedy(model, TOKENS, 250)
    shape = {"num_prefill": 2, "num_decode": 2, "prefix_fetch": "never"}
    async with staged(tmp_path / "run", Holding, model=model, **shape) as stage:
        child = stage.cluster.children["prefill-0"]
        os.kill(child.pid, signal.SIGUSR1)
        await stage.until(lambda: "armed" in child.log_path.read_text())
        asking = asyncio.create_task(stage.ask(TOKENS, "prefill-0", max_tokens=250))
        await stage.until(lambda: stage.dispatcher._active)
        active = next(iter(stage.dispatcher._active.values()))
        await stage.until(lambda: active.record.num_output_tokens > 0)  # the first token does not wait for blocks
        stage.placement.prefill = "prefill-1"
        stage.kill("prefill-0")
        await stage.until(lambda: active.record.num_output_tokens > 20)
        stage.kill(active.record.decode_worker)
        tokens, _ = await asking
    assert tokens == expected
