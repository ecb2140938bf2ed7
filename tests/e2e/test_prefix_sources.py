"""Prefixes from other workers' pools and from the store's tiers: real processes, UCX between them, a real index."""

from __future__ import annotations

import asyncio

import pytest

from shared.kv.hashing import chain
from shared.kv.rendezvous import by_keeper
from tests.e2e.running import BLOCK_SIZE, PatientCommands
from tests.e2e.stage import HOST_BYTES, Stage, prompt, staged

STORES = ("store-0", "store-1", "store-2")


async def test_a_prefix_is_fetched_from_the_pools_of_those_that_hold_it(tmp_path):
    """There is no store node at all. 600 tokens: 37 blocks are known, and the last 8 tokens are computed."""
    async with staged(tmp_path, num_prefill=2) as stage:
        for number, names in enumerate([("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")]):
            stage.lookup.peers = frozenset(names)
            tokens = prompt(600, seed=37 + 2 * number)
            expected, _ = await stage.ask(tokens, "prefill-0")
            await stage.held(tokens, 37, names)
            await stage.idle()
            before = given(stage)
            answer, summary = await stage.ask(tokens, "prefill-1")
            assert answer == expected
            assert summary.num_cached_tokens == summary.num_fetched_tokens == summary.num_peer_tokens == 37 * BLOCK_SIZE
            await stage.idle()
            now = {name: count - before[name] for name, count in given(stage).items()}
            assert sum(now.values()) == 37
            assert {name for name, count in now.items() if count} == set(names)
            assert stage.load("prefill-1").num_peer_hit_tokens == (number + 1) * 37 * BLOCK_SIZE


def given(stage: Stage) -> dict[str, int]:
    """How many blocks each of those that may hold a prefix has sent to others."""
    return {name: stage.load(name).num_blocks_given for name in ("prefill-0", "decode-0")}


@pytest.mark.slow
async def test_collocated_workers_fetch_from_each_other(tmp_path):
    async with staged(tmp_path, mode="collocated", num_prefill=0, num_decode=2) as stage:
        stage.lookup.peers = None
        tokens = prompt(400)
        stage.placement.decode = "decode-0"
        expected, _ = await stage.ask(tokens)
        await stage.held(tokens, 25, ["decode-0"])
        stage.placement.decode = "decode-1"
        answer, summary = await stage.ask(tokens)
        assert answer == expected
        assert (summary.decode_worker, summary.num_peer_tokens) == ("decode-1", 24 * BLOCK_SIZE)
        assert summary.num_cached_tokens == 24 * BLOCK_SIZE
        await stage.idle()


def shares(stage: Stage, tokens: list[int]) -> dict[str, int]:
    """How many of the first 37 blocks each store node keeps."""
    names = chain(stage.fleet.hash_root("t", len(tokens)), tokens, BLOCK_SIZE)[:37]
    kept = by_keeper(names, range(37), STORES)
    return {node: len(kept.get(node, ())) for node in STORES}


class OneSlow(PatientCommands):
    """store-1 sends eight blocks in 2.6 seconds."""

    def store_node(self, number, bind, redis_url):
        slow = ["--send-bytes-per-s", "200000"] if number == 1 else []
        return [*super().store_node(number, bind, redis_url), *slow]


@pytest.mark.slow
async def test_a_prefix_spread_over_three_nodes_comes_back_and_one_that_dies_costs_its_own_blocks_alone(tmp_path):
    spec = {"num_prefill": 3, "store_nodes": 3, "store_host_bytes": HOST_BYTES}
    async with staged(tmp_path, OneSlow, **spec) as stage:
        prompts = (prompt(600, seed=37 + 2 * number) for number in range(100))
        # store-1 sends 8 of its blocks at once, and has some left when it dies.
        spread = (tokens for tokens in prompts if shares(stage, tokens)["store-1"] in range(12, 20))
        tokens = next(spread)
        kept = shares(stage, tokens)
        expected, _ = await stage.ask(tokens, "prefill-0")
        await stage.stored(tokens, 37)

        answer, summary = await stage.ask(tokens, "prefill-1")
        assert answer == expected
        assert summary.num_cached_tokens == summary.num_fetched_tokens == 37 * BLOCK_SIZE
        assert summary.num_peer_tokens == 0

        asking = asyncio.create_task(stage.ask(tokens, "prefill-2"))
        others = (37 - kept["store-1"]) * BLOCK_SIZE
        await stage.until(lambda: stage.load("prefill-2").num_host_hit_tokens >= others)
        stage.kill("store-1")
        answer, summary = await asking
        assert answer == expected
        assert others <= summary.num_cached_tokens <= others + 8 * BLOCK_SIZE
        await stage.until(lambda: list(stage.load("prefill-2").silent_stores) == ["store-1"])

        # Its runs are the other nodes' from now on, and nobody waits for it.
        fresh = next(spread)
        expected, _ = await stage.ask(fresh, "prefill-2")
        await stage.stored(fresh, 37)
        await stage.ask(prompt(300, seed=97), "prefill-1")  # it too finds out that store-1 is gone
        await stage.until(lambda: list(stage.load("prefill-1").silent_stores) == ["store-1"])
        answer, summary = await stage.ask(fresh, "prefill-1")
        assert answer == expected
        assert summary.num_cached_tokens == 37 * BLOCK_SIZE
        await stage.idle()


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
            assert turn == 0 or summary.prefix_fetch_ms > 0
            if turn > 2:  # the worker has computed an earlier turn itself
                assert 0 < summary.num_fetched_tokens < known
            assert summary.num_peer_tokens == (summary.num_fetched_tokens if source == "peers" else 0)
            known = (len(tokens) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            tokens = [*tokens, *answer, *prompt(21, seed=41 + turn)]


@pytest.mark.slow
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


@pytest.mark.slow
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
