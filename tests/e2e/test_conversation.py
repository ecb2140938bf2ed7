"""A conversation whose blocks everybody has dropped in between comes back from the store, turn by turn."""

from __future__ import annotations

import pytest

from tests.e2e.running import BLOCK_SIZE
from tests.e2e.stage import HOST_BYTES, prompt, staged

pytestmark = pytest.mark.slow


async def test_six_turns_compute_their_new_tokens_alone_although_pools_are_flooded_in_between(tmp_path):
    """Collocated: the workers that decode also fetch. Every turn finds the whole blocks of all before it, in the store
    alone, and computes the rest."""
    spec = {"mode": "collocated", "num_prefill": 0, "num_decode": 2, "num_kv_blocks": 64}
    async with staged(tmp_path, store_host_bytes=HOST_BYTES, **spec) as stage:
        tokens, known, flood = prompt(70), 0, 101
        for turn in range(6):
            expected, alone = await stage.ask(tokens, tenant=f"alone-{turn}")
            assert alone.num_cached_tokens == 0
            await stage.stored(tokens, known // BLOCK_SIZE)
            while await stage.pooled(tokens):
                flood += 2
                await stage.ask(prompt(600, seed=flood), max_tokens=1, tenant="flood")
            answer, summary = await stage.ask(tokens)
            assert answer == expected
            assert summary.num_cached_tokens == summary.num_fetched_tokens == known
            known = (len(tokens) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            tokens = [*tokens, *answer, *prompt(21, seed=41 + turn)]
        await stage.idle()
