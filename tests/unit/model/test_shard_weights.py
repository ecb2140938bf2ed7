"""A rank reads its slice of a checkpoint: the same numbers, and no more memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.errors import ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.parameters import DecoderParameters
from shared.model.shard import Degrees, Shard
from shared.model.shard_weights import load_shard
from shared.model.weights import load_weights


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
        own = DecoderParameters.allocate(shard.local_config, torch.float32, "cpu")
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


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, "LlamaForCausalLM", num_layers=1, num_heads=4, num_kv_heads=2)
    shard = Shard(config, Degrees(2), 0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated"):
        load_shard(tmp_path, shard, DecoderParameters.allocate(shard.local_config, torch.float32, "cpu"))
