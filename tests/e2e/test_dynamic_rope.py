"""Dynamic-NTK rope: prompts beyond the trained length share blocks with prompts of their own length alone, and router,
workers and `tandem cache` agree on what those are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from tests.e2e.running import BLOCK_SIZE, DEMO, running
from tests.e2e.stage import HOST_BYTES, prompt, staged
from tests.e2e.test_cache_command import cached, held

pytestmark = pytest.mark.slow

TRAINED_LEN = 64
MAX_MODEL_LEN = 512


def write_dynamic(folder: Path) -> Path:
    write_random_checkpoint(
        folder,
        vocab_size=load_config(DEMO).vocab_size,
        head_dim=16,
        max_position_embeddings=TRAINED_LEN,
        rope={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 8.0},
        tokenizer_from=DEMO,
    )
    return folder


async def test_a_repeated_long_prompt_is_placed_where_its_prefix_lies(tmp_path):
    model = write_dynamic(tmp_path / "model")
    async with staged(tmp_path, model=model, num_prefill=2, max_model_len=MAX_MODEL_LEN) as stage:
        tokens = prompt(200)
        expected, first = await stage.ask(tokens, "prefill-1", max_tokens=4)
        assert first.num_cached_tokens == 0
        await stage.held(tokens, 12, ["prefill-1", "decode-0"])
        hits = await stage.lookup.hits(tokens, "t", len(tokens))
        assert hits.local == {"prefill-1": 192, "decode-0": 192}
        answer, again = await stage.ask(tokens, max_tokens=4)
        assert answer == expected
        assert (again.prefill_worker, again.num_cached_tokens) == ("prefill-1", 192)
        # One token more turns all tokens differently.
        longer = [*tokens, 7]
        assert (await stage.lookup.hits(longer, "t", len(longer))).local == {}
        assert (await stage.ask(longer, "prefill-1", max_tokens=4))[1].num_cached_tokens == 0
        # Up to the trained length, lengths do not matter.
        await stage.ask(tokens[:TRAINED_LEN], "prefill-0", max_tokens=1)
        await stage.held(tokens[:50], 3, ["prefill-0"])
        assert (await stage.ask(tokens[:50], max_tokens=1))[1].num_cached_tokens == 3 * BLOCK_SIZE


async def test_a_pin_names_the_chain_that_the_workers_have(tmp_path):
    model = write_dynamic(tmp_path / "model")
    spec = {"max_model_len": MAX_MODEL_LEN, "store_host_bytes": HOST_BYTES, "prefix_fetch": "always"}
    async with running(tmp_path, model, **spec) as run:
        tokens = prompt(6 * BLOCK_SIZE + 1)
        assert await cached(run, tokens, "big") == 0
        await held(run, "big", 6)
        ids = ",".join(map(str, tokens))
        pin = ("pin", ids, "--token-ids", "--tenant", "big", "--name", "long")
        status, out, err = await run.command("cache", *pin)
        assert (status, err) == (0, "")
        assert out == "pinned 'long': 97 tokens, 6 blocks, 6 of them stored; all are kept\n"
