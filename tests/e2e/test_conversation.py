"""A conversation whose blocks everybody has dropped in between comes back from the store, turn by turn."""

from __future__ import annotations

import contextlib

import pytest

from tests.e2e.running import BLOCK_SIZE
from tests.e2e.stage import HOST_BYTES, prompt, staged
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow


async def stored_in_the_end(stage, tokens, num_tokens: int, asked) -> None:
    """What `asked` left. A store that does not answer in time, on a machine with much to do, is not asked again for the
    same sequence: the next one to have these blocks offers them."""
    for _ in range(3):
        with contextlib.suppress(TimeoutError):
            await stage.stored(tokens, num_tokens // BLOCK_SIZE, deadline_s=DEADLINE_S / 4)
            return
        await stage.ask(asked)
    await stage.stored(tokens, num_tokens // BLOCK_SIZE)


async def test_six_turns_compute_their_new_tokens_alone_although_pools_are_flooded_in_between(tmp_path):
    """Collocated: the workers that decode also fetch. Every turn finds the whole blocks of all before it, in the store
    alone, and computes the rest."""
    spec = {"mode": "collocated", "num_prefill": 0, "num_decode": 2, "num_kv_blocks": 64}
    async with staged(tmp_path, store_host_bytes=HOST_BYTES, **spec) as stage:
        tokens, known, flood = prompt(70), 0, 101
        asked = tokens
        for turn in range(6):
            expected, alone = await stage.ask(tokens, tenant=f"alone-{turn}")
            assert alone.num_cached_tokens == 0
            await stored_in_the_end(stage, tokens, known, asked)
            while await stage.pooled(tokens):
                flood += 2
                await stage.ask(prompt(600, seed=flood), max_tokens=1, tenant="flood")
            asked = tokens
            answer, summary = await stage.ask(tokens)
            assert answer == expected
            assert summary.num_cached_tokens == summary.num_fetched_tokens == known
            known = (len(tokens) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            tokens = [*tokens, *answer, *prompt(21, seed=41 + turn)]
        await stage.idle()
