"""Models with experts and with latents through a cluster: the tokens of transformers by every way a prefix can come."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.model.checkpoints import write_random_checkpoint
from tests.e2e.running import BLOCK_SIZE, DEMO
from tests.e2e.stage import HOST_BYTES, prompt, staged
from tests.integration.engine.families import EXPERTS, YARN
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy

pytestmark = pytest.mark.slow

NUM_TOKENS = 24


def write_model(folder: Path, family: str) -> Path:
    """A small checkpoint of a family of EXPERTS that a cluster serves with the demo model's tokenizer."""
    architecture, extra = EXPERTS[family]
    is_latent = family.startswith("deepseek")
    write_random_checkpoint(
        folder, architecture, vocab_size=2048, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
        num_kv_heads=4 if is_latent else 2, head_dim=16, rope=YARN if is_latent else None, extra_config=extra,
        tokenizer_from=DEMO,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
async def test_handed_over_cached_and_stored_prefixes_give_the_tokens_of_transformers(
    tmp_path: Path, family: str
) -> None:
    model = write_model(tmp_path / "model", family)
    tokens = prompt(200)
    expected = transformers_greedy(model, tokens, NUM_TOKENS)
    async with staged(tmp_path / "run", model=model, num_prefill=2, store_host_bytes=HOST_BYTES) as stage:
        handed_over, summary = await stage.ask(tokens, "prefill-0")
        assert handed_over == expected
        assert (summary.prefill_worker, summary.num_cached_tokens) == ("prefill-0", 0)
        await stage.stored(tokens, 12)
        fetched, summary = await stage.ask(tokens, "prefill-1")
        assert fetched == expected
        assert summary.prefill_worker == "prefill-1"
        assert summary.num_cached_tokens == summary.num_fetched_tokens == 12 * BLOCK_SIZE
        assert summary.num_peer_tokens == 0
        cached, summary = await stage.ask(tokens, "prefill-1")
        assert cached == expected
        assert (summary.num_cached_tokens, summary.num_fetched_tokens) == (12 * BLOCK_SIZE, 0)
        assert await stage.num_bad() == 0
