"""Prefixes from the store's tiers: real workers, UCX between processes, a real index."""

from __future__ import annotations

import pytest

from shared.kv.hashing import chain
from tests.e2e.running import BLOCK_SIZE
from tests.e2e.stage import HOST_BYTES, prompt, staged


@pytest.mark.slow
@pytest.mark.parametrize("source", ["store", "peers"])
async def test_six_turns_on_changing_workers_compute_their_new_tokens_alone(tmp_path, source):
    """And the last one after the worker of every earlier turn was killed; a decode worker holds all of them."""
    spec = {"store_host_bytes": HOST_BYTES} if source == "store" else {}
    async with staged(tmp_path, num_prefill=3, **spec) as stage:
        stage.lookup.peers = frozenset() if source == "store" else None
        tokens, known = prompt(70), 0
        for turn in range(6):
            if turn == 5:
                stage.kill("prefill-0")
                stage.kill("prefill-1")
                await stage.until(lambda: sum(link.connected for link in stage.fleet.links) == 2)
            expected, alone = await stage.ask(tokens, "prefill-2", tenant=f"alone-{turn}")
            assert alone.num_cached_tokens == 0
            if source == "store":
                await stage.stored(tokens, known // BLOCK_SIZE)
            else:
                await stage.held(tokens, known // BLOCK_SIZE, ["decode-0"])
            answer, summary = await stage.ask(tokens, f"prefill-{turn % 3}")
            assert answer == expected
            assert summary.prefill_worker == f"prefill-{turn % 3}"
            assert summary.num_cached_tokens == known
            assert turn == 0 or summary.ttft.prefix_fetch_ms > 0
            if turn > 2:  # the worker has computed an earlier turn itself
                assert 0 < summary.num_fetched_tokens < known
            assert summary.num_peer_tokens == (summary.num_fetched_tokens if source == "peers" else 0)
            known = (len(tokens) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            tokens = [*tokens, *answer, *prompt(21, seed=41 + turn)]


async def test_flipped_bits_on_disk_are_computed_again_and_nothing_else(tmp_path):
    folder = tmp_path / "blocks"
    spec = {"num_prefill": 2, "store_disk_folder": folder, "store_disk_bytes": HOST_BYTES}
    async with staged(tmp_path, **spec) as stage:
        tokens = prompt(200)
        expected, _ = await stage.ask(tokens, "prefill-0")
        await stage.stored(tokens, 12)
        names = chain(stage.fleet.hash_root("t", len(tokens)), tokens, BLOCK_SIZE)
        for index in (3, 9):
            path = folder / names[index].hex()[:2] / f"{names[index].hex()}.kv"
            content = bytearray(path.read_bytes())
            content[-100] ^= 16
            path.write_bytes(content)
        answer, summary = await stage.ask(tokens, "prefill-1")
        assert answer == expected
        assert summary.num_cached_tokens == (12 - 2) * BLOCK_SIZE
        assert await stage.num_bad() == 2
        await stage.idle()


async def test_a_prompt_comes_back_after_every_pool_was_flooded(tmp_path):
    """Collocated: the workers that decode also fetch."""
    spec = {"mode": "collocated", "num_prefill": 0, "num_decode": 2, "num_kv_blocks": 64}
    async with staged(tmp_path, store_host_bytes=HOST_BYTES, **spec) as stage:
        tokens = prompt(330)
        expected, _ = await stage.ask(tokens)
        await stage.stored(tokens, 20)
        flood = 41
        while await stage.pooled(tokens):
            await stage.ask(prompt(600, seed=(flood := flood + 2)), max_tokens=1)
        answer, summary = await stage.ask(tokens)
        assert answer == expected
        assert summary.num_cached_tokens == summary.num_fetched_tokens == 20 * BLOCK_SIZE
        await stage.idle()
