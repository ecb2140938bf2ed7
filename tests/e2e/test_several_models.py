"""Two models of different families behind one door, each with its own pools, under load at once."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from services.local.model_pools import ModelPools
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc, inference_pb2
from tests.e2e.running import BLOCK_SIZE, DEMO, running
from tests.unit.model.paged_run import load_oracle, oracle_greedy
from tests.waiting import DEADLINE_S, until

NUM_TOKENS = 12
PROMPTS = [[20 + (i * step) % 2000 for i in range(40 + step)] for step in (3, 7, 11, 37)]
WORKERS = {"llama": ("prefill-0", "decode-0"), "qwen": ("qwen-prefill-0", "qwen-decode-0")}


def write_model(folder: Path, architecture: str, seed: int, num_layers: int = 2) -> Path:
    write_random_checkpoint(
        folder,
        architecture,
        vocab_size=load_config(DEMO).vocab_size,
        num_layers=num_layers,
        head_dim=16,
        seed=seed,
        tokenizer_from=DEMO,
    )
    return folder


async def test_each_model_finds_its_own_blocks_in_the_store_and_never_the_others(tmp_path):
    """The prompts are the same tokens, the blocks of other sizes; the workers that computed them are gone."""
    folders = {
        "llama": write_model(tmp_path / "llama", "LlamaForCausalLM", 1),
        "qwen": write_model(tmp_path / "q", "Qwen3ForCausalLM", 2, num_layers=3),
    }
    prompt = [20 + (i * 37) % 2000 for i in range(5 * BLOCK_SIZE + 3)]
    expected = {name: oracle_greedy(load_oracle(folder), prompt, NUM_TOKENS)[0] for name, folder in folders.items()}
    alone = {"mode": "collocated", "num_prefill": 0}
    qwen = ModelPools(name="qwen", model=folders["qwen"], dtype="fp32", num_kv_blocks=256, prefix="qwen-", **alone)
    spec = {"further": (qwen,), "store_host_bytes": 1 << 24, "prefix_fetch": "always", "restart": True, **alone}
    async with running(tmp_path, folders["llama"], **spec) as run:
        cache = cache_pb2_grpc.CacheServiceStub(run.channel)

        async def ask(model: str) -> int:
            answer = await run.complete(prompt, model=model, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert answer["choices"][0]["token_ids"] == expected[model]
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        async def held(model: str) -> tuple[int, int]:
            """Blocks of the prompt that its pin names, and those of them that its one node has."""
            request = cache_pb2.PinPrefixRequest(name="p", model=model, tokens=inference_pb2.TokenIds(ids=prompt))
            pinned = await cache.PinPrefix(request, timeout=DEADLINE_S)
            (node,) = pinned.nodes
            assert not node.failure
            return pinned.num_blocks, node.pin.num_held

        async def stored(model: str) -> None:
            async def all_held() -> bool:
                return await held(model) == (5, 5)

            await until(all_held)

        assert await ask("llama") == 0
        await stored("llama")
        assert await held("qwen") == (5, 0)
        assert await ask("qwen") == 0  # the other model's blocks of these tokens lie in the index
        await stored("qwen")
        workers = ("decode-0", "qwen-decode-0")
        before = {worker.worker.name: worker.worker.incarnation for worker in (await run.status()).workers}
        for name in workers:
            run.signal(name)
        await run.until(
            lambda status: all(
                worker.connected and worker.worker.incarnation != before[worker.worker.name]
                for worker in status.workers
            )
        )
        assert [await ask("llama"), await ask("qwen")] == [5 * BLOCK_SIZE] * 2
        stats = await cache.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=DEADLINE_S)
        nodes = {node.stats.node_name: node.stats.tiers[0] for node in stats.nodes}
        assert set(nodes) == {"store-0", "qwen-store-0"}
        assert all(tier.num_hits >= 5 and not tier.num_bad for tier in nodes.values())
        assert not any(list(worker.load.silent_stores) for worker in (await run.status()).workers)
        wrong = cache_pb2.PinPrefixRequest(name="p", model="mamba", text="x")
        with pytest.raises(grpc.aio.AioRpcError, match="'mamba' is not served here"):
            await cache.PinPrefix(wrong, timeout=DEADLINE_S)
