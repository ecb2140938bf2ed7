"""Checkpoints in fewer bits beside transformers, which computes with the same weights opened to fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.model.decoder import Decoder
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import EXPERTS, OTHERS, write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import load_transformers
from tests.quantized_checkpoints import OPENED, STORAGES, write_mxfp4, write_quantized
from tests.unit.model.paged_run import greedy, prompt_logits

NUM_TOKENS = 32
PROMPT = [7 + (i * 37) % 190 for i in range(53)]
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_heads": 8, "num_kv_heads": 4}
FAMILIES = {
    "LlamaForCausalLM": {},
    "mixtral": {},
    "glm4-moe": {"extra_config": {**OTHERS["glm4-moe"][1], "moe_intermediate_size": 64}},
    "deepseek-v3": {
        "num_kv_heads": 8,
        "extra_config": {**EXPERTS["deepseek-v3"][1], "q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 16},
    },
}
"""Family → settings that leave whole groups to each of two ranks."""


def few(*names: str) -> list[object]:
    """All storages, of which these alone are tried by default."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in STORAGES]


def slow(*families: str) -> list[object]:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


def write(tmp_path: Path, name: str, family: str = "LlamaForCausalLM", *, head: bool = False) -> tuple[Path, Path]:
    """(quantized folder, the same opened)."""
    source = write_family(tmp_path / "source", family, **{**SIZES, **FAMILIES.get(family, {})})
    write_quantized(source, STORAGES[name], tmp_path / "quantized", tmp_path / "opened", head=head)
    return tmp_path / "quantized", tmp_path / "opened"


def expected_of(folder: Path) -> tuple[torch.Tensor, list[int]]:
    """(logits of the prompt, greedy tokens behind it) of transformers."""
    model = load_transformers(folder)
    tokens = list(PROMPT)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return logits, tokens[len(PROMPT) :]


def as_opened(quantized: Path, opened: Path) -> tuple[Decoder, list[int]]:
    """The decoder of a quantized folder, with the logits of the opened one, and transformers' greedy tokens of that."""
    expected, tokens = expected_of(opened)
    decoder = Decoder.load(quantized, torch.float32, "cpu")
    found = prompt_logits(decoder, PROMPT, 20)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    return decoder, tokens


@pytest.mark.parametrize(
    "name",
    few(
        "int4 groups with zeros",
        "w8a8",
        "awq",
        "gptq ordered",
        "small fp8 blocks",
        "nf4",
        "nvfp4",
        "mxfp4 linear",
        "mxfp8",
    ),
)
def test_every_storage_gives_the_logits_and_tokens_of_the_opened_weights(tmp_path, name):
    quantized, opened = write(tmp_path, name)
    decoder, tokens = as_opened(quantized, opened)
    assert greedy(decoder, PROMPT, NUM_TOKENS)[0] == tokens
    plain = Decoder.load(opened, torch.float32, "cpu")
    assert (decoder.projection_bytes < plain.projection_bytes) == (name not in OPENED)


def test_experts_in_mxfp4_give_the_tokens_of_the_opened_weights(tmp_path):
    source = write_family(tmp_path / "source", "gpt-oss", hidden_size=64, intermediate_size=64)
    quantized, opened = tmp_path / "quantized", tmp_path / "opened"
    write_mxfp4(source, quantized, opened)
    decoder, tokens = as_opened(quantized, opened)
    assert greedy(decoder, PROMPT, NUM_TOKENS)[0] == tokens
    with EngineRun(quantized) as prefill, EngineRun(quantized) as decode:
        assert hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS) == tokens
    for degrees in (Degrees(tensor=2), Degrees(tensor=2, expert=2)):
        with GroupRun(quantized, degrees) as group:
            assert group.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == tokens


@pytest.mark.parametrize("family", ["mixtral", *slow("deepseek-v3")])
@pytest.mark.parametrize("name", few("int4 groups"))
def test_experts_and_latents_in_fewer_bits(tmp_path, name, family):
    quantized, opened = write(tmp_path, name, family)
    decoder, tokens = as_opened(quantized, opened)
    assert greedy(decoder, PROMPT, NUM_TOKENS)[0] == tokens


@pytest.mark.parametrize("name", few("gptq ordered"))
@pytest.mark.parametrize("family", ["LlamaForCausalLM", *slow("mixtral")])
def test_hand_offs_and_ranks_give_the_same_tokens(tmp_path, name, family):
    quantized, opened = write(tmp_path, name, family)
    _, expected = expected_of(opened)
    with EngineRun(quantized) as prefill, EngineRun(quantized) as decode:
        assert decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == expected
        decode.pool.clear_cache()
        assert hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS) == expected
    if STORAGES[name].config.get("weight_block_size") != [128, 128]:  # two ranks split blocks as wide as the model
        with GroupRun(quantized, Degrees(tensor=2)) as group:
            assert group.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == expected


@pytest.mark.parametrize(
    "family", ["phi3", "glm4", *slow("gemma2", "gemma3", "glm4-moe", "olmo2", "cohere2", "smollm3")]
)
@pytest.mark.parametrize("name", ["int4 groups with zeros", *slow("gptq ordered", "small fp8 blocks")])
def test_other_families_in_fewer_bits(tmp_path, name, family):
    quantized, opened = write(tmp_path, name, family)
    _, tokens = as_opened(quantized, opened)
    with GroupRun(quantized, Degrees(tensor=2)) as group:
        assert group.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == tokens
