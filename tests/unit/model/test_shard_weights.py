"""A rank reads its slice of a checkpoint: the same numbers, and no more memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shared.errors import ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config.model_config import ModelConfig
from shared.model.layers.parameters import DecoderParameters
from shared.model.ranks.shard import Degrees, Shard
from shared.model.ranks.shard_weights import allocate_shard, load_shard
from shared.model.weights.loader import load_weights
from tests.integration.engine.families import EXPERTS


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(4, 2), Degrees(1, 3)], ids=str)
def test_the_ranks_slices_are_those_of_the_whole_model(tmp_path: Path, degrees: Degrees, tie: bool) -> None:
    config = write_random_checkpoint(
        tmp_path, "LlamaForCausalLM", num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16, tie=tie,
        intermediate_size=112, vocab_size=100, extra_config={"attention_bias": True, "mlp_bias": True},
        max_shard_bytes=60_000,
    )  # fmt: skip
    whole = DecoderParameters.allocate(config, torch.float32, "cpu")
    load_weights(tmp_path, whole.checkpoint_views(config))
    for rank in range(degrees.num_ranks):
        shard = Shard(config, degrees, rank)
        own = allocate_shard(shard, torch.float32)
        load_shard(tmp_path, shard, own)
        heads, kv_heads, inner = shard.heads, shard.kv_heads, shard.inner
        for index, layer in enumerate(own.layers):
            of_whole = whole.layers[shard.layers.begin + index]
            query, key, value = (part.unflatten(0, (-1, 16)) for part in torch.split(of_whole.qkv, [128, 32, 32]))
            expected = torch.cat(
                [query[heads.begin : heads.end], *(x[kv_heads.begin : kv_heads.end] for x in (key, value))]
            ).flatten(0, 1)
            assert torch.equal(layer.qkv, expected)
            assert torch.equal(layer.o, of_whole.o[:, heads.begin * 16 : heads.end * 16])
            assert torch.equal(layer.down, of_whole.down[:, inner.begin : inner.end])
            gate, up = of_whole.gate_up.chunk(2)
            assert torch.equal(layer.gate_up, torch.cat([x[inner.begin : inner.end] for x in (gate, up)]))
            assert layer.o_bias is not None
            assert torch.equal(layer.o_bias, of_whole.o_bias if shard.part == 0 else torch.zeros_like(layer.o_bias))
        if shard.is_first:
            assert torch.equal(own.embedding, whole.embedding[shard.vocab.begin : shard.vocab.end])
        if shard.is_last:
            assert torch.equal(own.lm_head, whole.lm_head[shard.vocab.begin : shard.vocab.end])
            assert torch.equal(own.norm, whole.norm)


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(4, expert=2), Degrees(4, expert=4), Degrees(2, 2)], ids=str)
def test_the_ranks_experts_and_latents_are_those_of_the_whole_model(tmp_path: Path, degrees: Degrees) -> None:
    config = write_random_checkpoint(
        tmp_path, "DeepseekV3ForCausalLM", num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=48,
        vocab_size=100, extra_config={**EXPERTS["deepseek-v3"][1], "n_routed_experts": 10, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 2, "moe_intermediate_size": 24},
    )  # fmt: skip
    whole = DecoderParameters.allocate(config, torch.float32, "cpu")
    load_weights(tmp_path, whole.checkpoint_views(config))
    held: dict[int, list[int]] = {}  # expert → its columns on all ranks, in a layer
    for rank in range(degrees.num_ranks):
        shard = Shard(config, degrees, rank)
        own = allocate_shard(shard, torch.float32)
        load_shard(tmp_path, shard, own)
        heads, inner, shared, of_expert = shard.heads, shard.inner, shard.shared_inner, shard.expert_inner
        for index, layer in enumerate(own.layers):
            of_whole = whole.layers[shard.layers.begin + index]
            assert layer.latent is not None
            assert of_whole.latent is not None
            assert torch.equal(layer.qkv, of_whole.qkv), "the latents of queries and of the cache, on every rank"
            assert torch.equal(layer.latent.q, of_whole.latent.q[heads.begin * 20 : heads.end * 20])
            assert torch.equal(layer.latent.kv, of_whole.latent.kv[heads.begin * 32 : heads.end * 32])
            assert torch.equal(layer.o, of_whole.o[:, heads.begin * 20 : heads.end * 20])
            columns = inner if layer.experts is None else shared
            gate, up = of_whole.gate_up.chunk(2)
            assert torch.equal(layer.gate_up, torch.cat([x[columns.begin : columns.end] for x in (gate, up)]))
            assert torch.equal(layer.down, of_whole.down[:, columns.begin : columns.end])
            if layer.experts is None:
                continue
            of_all = of_whole.experts
            assert torch.equal(layer.experts.router, of_all.router)
            assert torch.equal(layer.experts.router_bias, of_all.router_bias)
            assert shard.experts is not None
            ids = shard.experts[index]
            assert layer.experts.experts == ids
            for expert, gate_up, down in zip(ids, layer.experts.gate_up, layer.experts.down, strict=True):
                gate, up = of_all.gate_up[expert].chunk(2)
                kept = [x[of_expert.begin : of_expert.end] for x in (gate, up)]
                assert torch.equal(gate_up, torch.cat(kept))
                assert torch.equal(down, of_all.down[expert][:, of_expert.begin : of_expert.end])
                if shard.layers.begin + index == 2:
                    held.setdefault(expert, []).extend(range(of_expert.begin, of_expert.end))
    assert held == {expert: list(range(24)) for expert in range(10)}, "each column of each expert once"


def test_tensors_that_no_rank_reads_are_no_fault(tmp_path: Path) -> None:
    """Layers behind the decoder's own, which predict further."""
    extra = {**EXPERTS["deepseek-v3"][1], "num_nextn_predict_layers": 0}
    sizes = {"num_heads": 4, "num_kv_heads": 4}
    write_random_checkpoint(tmp_path, "DeepseekV3ForCausalLM", num_layers=3, extra_config=extra, **sizes)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**content, "num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    )
    shard = Shard(ModelConfig.load(tmp_path), Degrees(2), 1)
    load_shard(tmp_path, shard, allocate_shard(shard, torch.float32))


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, "LlamaForCausalLM", num_layers=1, num_heads=4, num_kv_heads=2)
    shard = Shard(config, Degrees(2), 0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated"):
        load_shard(tmp_path, shard, allocate_shard(shard, torch.float32))
