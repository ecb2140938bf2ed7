"""Two models of different families behind one door, each with its own pools, under load at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from services.local.model_pools import ModelPools
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config.model_config import ModelConfig
from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc, inference_pb2, types_pb2
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
        vocab_size=ModelConfig.load(DEMO).vocab_size,
        num_layers=num_layers,
        head_dim=16,
        seed=seed,
        tokenizer_from=DEMO,
    )
    return folder


@pytest.mark.slow
async def test_two_families_under_load_at_once_and_one_without_the_other(tmp_path):
    folders = {
        "llama": write_model(tmp_path / "llama", "LlamaForCausalLM", 1),
        "qwen": write_model(tmp_path / "q", "Qwen3ForCausalLM", 2),
    }
    expected = {
        name: [oracle_greedy(oracle, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]
        for name, folder in folders.items()
        for oracle in [load_oracle(folder)]
    }
    assert not any(one == other for one, other in zip(*expected.values(), strict=True))
    qwen = ModelPools(
        name="qwen", model=folders["qwen"], aliases=("acme/q",), dtype="fp32", num_kv_blocks=256, prefix="qwen-"
    )
    spec = {"served_model_name": "llama", "aliases": ("gpt-4",), "further": (qwen,)}
    async with running(tmp_path, folders["llama"], **spec) as run:
        fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True}

        async def check(asked: str, model: str, number: int) -> None:
            answer = await run.complete(PROMPTS[number], model=asked, **fields)
            assert answer["choices"][0]["token_ids"] == expected[model][number]
            assert answer["model"] == model
            served_by = answer["choices"][0].get("tandem") or answer["tandem"]
            assert served_by["decode_worker"] == WORKERS[model][1]
            assert served_by["prefill_worker"] in (WORKERS[model][0], "")

        names = {"llama": "llama", "gpt-4": "llama", "qwen": "qwen", "acme/q": "qwen"}
        await asyncio.gather(
            *(check(asked, model, number) for asked, model in names.items() for number in range(len(PROMPTS)))
        )

        async def generate(model: str, number: int) -> list[int]:
            request = inference_pb2.GenerateRequest(
                model=model,
                tokens=inference_pb2.TokenIds(ids=PROMPTS[number]),
                sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
            )
            return [token async for part in run.stub.Generate(request, timeout=DEADLINE_S) for token in part.token_ids]

        assert await asyncio.gather(generate("qwen", 0), generate("", 0)) == [expected["qwen"][0], expected["llama"][0]]

        listed = (await run.http.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["llama", "gpt-4", "qwen", "acme/q"]
        assert (await run.http.get("/v1/models/acme/q")).json()["root"] == "qwen"
        unknown = await run.http.post("/v1/completions", json={"model": "mamba", "prompt": "x"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert "'llama', 'qwen' are" in unknown.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate("mamba", 0)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        status = await run.idle()
        assert {worker.worker.name: worker.model for worker in status.workers} == {
            worker: model for model, workers in WORKERS.items() for worker in workers
        }
        assert [(model.name, list(model.aliases), model.ready) for model in status.models] == [
            ("llama", ["gpt-4"], True),
            ("qwen", ["acme/q"], True),
        ]
        metrics = (await run.http.get("/metrics")).text
        for model, count in (("llama", 9), ("qwen", 9)):
            assert f'tandem_requests_total{{gen_ai_response_model="{model}",outcome="finished"}} {count}.0' in metrics
        assert metrics.count("# HELP tandem_requests_total ") == 1

        run.signal("qwen-decode-0")
        await run.until(lambda status: not status.models[1].ready)
        gone = await run.http.post("/v1/completions", json={"model": "qwen", "prompt": "x"})
        assert gone.status_code == 503
        await check("llama", "llama", 0)
        page = await run.http.get("/readyz")
        assert page.status_code == 200
        assert page.json()["models"]["llama"] == ""
        assert "no decode worker is ready" in page.json()["models"]["qwen"]


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
