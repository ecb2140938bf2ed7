"""A decoder with adapters gives the logits of the models that these are merged into."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.kernels.lora.rows import LoraRows
from shared.model.adapters.adapter import in_dtype
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config

from ..paged_run import oracle_greedy, oracle_logits
from ..saved_families import save
from .merged import MixedBatch, merged

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes of whole vectors: every op by the C++ kernels where there are any, all layers by one call."""
PROMPT = random.Random(4).choices(range(3, 97), k=37)
TOLERANCE = 1e-4
"""Of the largest logit."""
KERNELS = ["auto", "torch"]
FORMS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8},
    "attention alone": {"targets": ["q_proj", "v_proj"], "rank": 4},
    "one projection": {"targets": ["k_proj"], "rank": 1},
    "feed-forward alone": {"targets": ["gate_proj", "down_proj"], "rank": 16},
    "rank stabilised": {"rank": 20, "use_rslora": True},
    "patterns": {
        "rank": 8,
        "rank_pattern": {"q_proj": 33, "up_proj": 2},
        "alpha_pattern": {"q_proj": 5, "down_proj": 3.5},
    },
    "rank 256": {"targets": ["q_proj", "o_proj", "up_proj"], "rank": 256},
}


def assert_as_merged(folder: Path, model: Any, adapter: Path, kernels: str = "auto") -> None:
    decoder = Decoder.load(folder, torch.float32, "cpu", kernels=kernels)
    packed = decoder.pack_adapter(decoder.read_adapter(adapter))
    oracle = merged(model, adapter)
    expected = oracle_logits(oracle, PROMPT)
    assert (expected - oracle_logits(model, PROMPT)).abs().max() > 0.01 * expected.abs().max(), "it changes nothing"
    whole = MixedBatch(decoder, [packed], len(PROMPT)).step([PROMPT])
    chunked = MixedBatch(decoder, [packed], len(PROMPT))
    found = torch.cat([chunked.step([PROMPT[at : at + 7]], rope_length=len(PROMPT)) for at in range(0, len(PROMPT), 7)])
    for logits in (whole, found):
        assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()
    last = MixedBatch(decoder, [packed], len(PROMPT)).step([PROMPT], all_rows=False)
    assert (last[0] - expected[-1]).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_adapter_is_as_merged(tmp_path: Path, form: str, kernels: str) -> None:
    model = save(tmp_path / "base", "llama", **WIDE)
    fields = dict(FORMS[form])
    adapter = write_random_adapter(tmp_path / "adapter", load_config(tmp_path / "base"), **fields)
    assert_as_merged(tmp_path / "base", model, adapter, kernels)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "mixtral",
        "qwen3-moe",
        "granite",
        "olmo2",
        "phi3",
        "phi3-longrope",
        "glm4",
        "glm4-moe",
        "gemma3",
        "gpt-oss",
        "cohere2",
        "llama4",
        "smollm3",
        "qwen3-next",
        "qwen3.5",
        "qwen3.5-moe",
    ],
)
def test_every_family_is_as_merged(tmp_path: Path, name: str) -> None:
    """Odd sizes, fused projections, rotated pairs in another order, experts in place of the feed-forward block."""
    model = save(tmp_path / "base", name)
    adapter = write_random_adapter(tmp_path / "adapter", load_config(tmp_path / "base"), rank=6)
    assert_as_merged(tmp_path / "base", model, adapter)


@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_one_pair_for_all_experts_of_a_layer_is_as_merged(tmp_path: Path, name: str) -> None:
    model = save(tmp_path / "base", name, hidden_size=64, moe_intermediate_size=48)
    config = load_config(tmp_path / "base")
    assert config.moe is not None
    count, inner, hidden = config.moe.routing.num_experts, config.moe.expert_size, config.hidden_size
    leaves = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = write_random_adapter(
        tmp_path / "adapter", config, rank=4, targets=["o_proj"], target_parameters=leaves, strength=2.0
    )
    tensors, draw = load_file(adapter / "adapter_model.safetensors"), torch.Generator().manual_seed(7)
    for layer in range(config.num_layers):
        experts = f"base_model.model.model.layers.{layer}.mlp.experts"
        for module, in_size, outputs in ((f"{experts}.base_layer", hidden, 2 * inner), (experts, inner, hidden)):
            tensors[f"{module}.lora_A.weight"] = torch.randn(4 * count, in_size, generator=draw) * in_size**-0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4 * count, generator=draw)
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert_as_merged(tmp_path / "base", model, adapter)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        ("auto", "qwen3-moe"),
        ("torch", "mixtral"),
        *(
            pytest.param(kernels, name, marks=pytest.mark.slow)
            for kernels, name in (
                ("auto", "mixtral"),
                ("auto", "glm4-moe"),
                ("torch", "qwen3-moe"),
                ("torch", "glm4-moe"),
            )
        ),
    ],
)
def test_adapters_of_experts_are_as_merged(tmp_path: Path, name: str, kernels: str) -> None:
    """Of all experts and of some, of one of their projections alone, beside each other and the base."""
    model = save(tmp_path / "base", name, hidden_size=64, moe_intermediate_size=48)
    config = load_config(tmp_path / "base")
    assert config.moe is not None
    gate, up, down = config.moe.projections
    forms: list[dict[str, Any]] = [
        {"targets": [gate, up, down], "rank": 8},
        {"targets": [up], "rank": 3},
        {"targets": [down, "q_proj"], "rank": 20},
    ]
    folders = [
        write_random_adapter(tmp_path / str(seed), config, seed=seed, strength=2.0, **form)
        for seed, form in enumerate(forms)
    ]
    for folder in folders:
        assert_as_merged(tmp_path / "base", model, folder, kernels)
    some = load_file(folders[0] / "adapter_model.safetensors")
    save_file({key: x for key, x in some.items() if ".experts.1." not in key}, folders[0] / "adapter_model.safetensors")
    assert_as_merged(tmp_path / "base", model, folders[0], kernels)
    decoder = Decoder.load(tmp_path / "base", torch.float32, "cpu", kernels=kernels)
    packed = [None, *(decoder.pack_adapter(decoder.read_adapter(folder)) for folder in folders)]
    prompts = [PROMPT[at : at + 9 + at] for at in range(4)]
    mixed = MixedBatch(decoder, packed, 64).greedy(prompts, 32)
    oracles = [model, *(merged(model, folder) for folder in folders)]
    assert mixed == [oracle_greedy(oracle, prompt, 32)[0] for oracle, prompt in zip(oracles, prompts, strict=True)]


def test_32_greedy_tokens_of_8_adapters_and_the_base_in_one_batch_are_those_of_each_alone(tmp_path: Path) -> None:
    model = save(tmp_path / "base", "llama", **WIDE)
    decoder = Decoder.load(tmp_path / "base", torch.float32, "cpu")
    folders = [
        write_random_adapter(tmp_path / str(seed), decoder.config, rank=1 + 5 * seed, seed=seed, strength=2.0)
        for seed in range(8)
    ]
    adapters = [decoder.pack_adapter(decoder.read_adapter(folder)) for folder in folders]
    draw = random.Random(9)
    prompts = [draw.choices(range(3, 97), k=draw.randint(3, 20)) for _ in range(11)]
    of_each = [None, *adapters, adapters[3], None]
    mixed = MixedBatch(decoder, of_each, 64).greedy(prompts, 32)
    for prompt, adapter, tokens in zip(prompts, of_each, mixed, strict=True):
        assert MixedBatch(decoder, [adapter], 64).greedy([prompt], 32) == [tokens]
    oracles = [model, *(merged(model, folder) for folder in folders)]
    for prompt, oracle, tokens in zip(prompts, oracles, mixed, strict=False):
        assert oracle_greedy(oracle, prompt, 32)[0] == tokens
    assert len({tuple(tokens) for tokens in mixed}) > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_beside_others_has_the_bits_that_it_has_alone_where_the_kernels_are_deterministic(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    save(tmp_path / "base", "llama", **WIDE)
    decoder = Decoder.load(tmp_path / "base", dtype, "cpu", deterministic=True)
    adapters = [
        decoder.pack_adapter(
            decoder.read_adapter(write_random_adapter(tmp_path / str(seed), decoder.config, rank=17, seed=seed))
        )
        for seed in range(2)
    ]
    of_each = [adapters[0], None, adapters[1], adapters[0]]
    prompts = [PROMPT[:11], PROMPT[3:9], PROMPT[:1], PROMPT[20:37]]
    together = MixedBatch(decoder, of_each, 40).step(prompts, all_rows=False)
    for row, (prompt, adapter) in enumerate(zip(prompts, of_each, strict=True)):
        alone = MixedBatch(decoder, [adapter], 40).step([prompt], all_rows=False)[0]
        assert torch.equal(alone, together[row])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_adapter_of_a_base_in_fewer_bits_adds_what_it_adds_to_the_plain_one(tmp_path: Path, kind: Any) -> None:
    save(tmp_path / "base", "llama", **WIDE)
    plain = Decoder.load(tmp_path / "base", torch.float32, "cpu")
    coded = Decoder.load(tmp_path / "base", torch.float32, "cpu", quantization=kind)
    folder = write_random_adapter(tmp_path / "adapter", plain.config)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    deltas = []
    for decoder in (plain, coded):
        packed = decoder.pack_adapter(decoder.read_adapter(folder))
        both = MixedBatch(decoder, [packed, None], 8).step([PROMPT[:4]] * 2, all_rows=False)
        base = MixedBatch(decoder, [None], 8).step([PROMPT[:4]], all_rows=False)[0]
        torch.testing.assert_close(both[1], base, rtol=0, atol=1e-4)
        assert not torch.allclose(both[0], both[1], atol=0.1)
        deltas.append(torch.zeros(5, 256))
        decoder.kernels.add_lora(deltas[-1], x, [packed.loras[0]], LoraRows.of([0, -1, 0, 0, -1], 1))
    assert torch.equal(*deltas)
    assert deltas[0][0].abs().max() > 0
    assert not deltas[0][[1, 4]].any()


@pytest.mark.parametrize(("name", "sizes"), [("llama", WIDE), ("mixtral", {})])
def test_a_copy_on_the_host_gives_what_the_folder_gave(tmp_path: Path, name: str, sizes: dict[str, Any]) -> None:
    save(tmp_path / "base", name, **sizes)
    config = load_config(tmp_path / "base")
    folder = write_random_adapter(tmp_path / "adapter", config, rank=4, dtype=torch.bfloat16)
    decoder = Decoder.load(tmp_path / "base", torch.float32, "cpu")
    adapter = decoder.read_adapter(folder)
    packed = decoder.pack_adapter(adapter)
    copy = decoder.host_copy(adapter, packed)
    assert copy.num_bytes == packed.nbytes
    kept = in_dtype(adapter, torch.float32)  # as where the kernels' memory is a device's
    assert kept.nbytes == 2 * adapter.nbytes
    of_folder, *others = (
        MixedBatch(decoder, [each], len(PROMPT)).step([PROMPT])
        for each in (packed, copy.lay_out(), decoder.pack_adapter(kept))
    )
    for logits in others:
        assert torch.equal(logits, of_folder)
