"""Every family as the locked transformers saves it, and as earlier releases spelled it: the next release's change
shows here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shared.errors import ModelLoadError
from shared.model.decoder import Decoder
from shared.model.families.registry import ARCHITECTURES, load_config, parse_config

from .paged_run import greedy, oracle_logits, prompt_logits
from .saved_families import FAMILIES, WITH_IMAGES, save, save_with_images

PROMPT = random.Random(1).choices(range(3, 97), k=37)
NUM_TOKENS = 64
TOLERANCE = 1e-4
"""Of the largest logit."""


@torch.no_grad()
def _continued(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens, each of a reading of the whole text: transformers' own cache keeps too much of a window of one."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _assert_same(folder: Path, model: PreTrainedModel, num_tokens: int) -> None:
    decoder = Decoder.load(folder, torch.float32, "cpu")
    expected = oracle_logits(model, PROMPT)
    for chunk_len in (len(PROMPT), 7):
        found = prompt_logits(decoder, PROMPT, chunk_len)
        assert (found - expected).abs().max() < TOLERANCE * expected.abs().max(), f"chunks of {chunk_len}"
    assert greedy(decoder, PROMPT, num_tokens)[0] == _continued(model, PROMPT, num_tokens)


def _respell(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def as_transformers_4(fields: dict[str, Any]) -> None:
    """The names of the fields before release 5."""
    fields["torch_dtype"] = fields.pop("dtype")
    if fields["model_type"] == "kimi_linear":
        _as_kimi_published(fields)
        return
    rope = fields.pop("rope_parameters")
    of_full = rope.get("full_attention", rope)
    fields["rope_theta"] = of_full.pop("rope_theta")
    if "sliding_attention" in rope:
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if "partial_rotary_factor" in of_full:
        fields["partial_rotary_factor"] = of_full.pop("partial_rotary_factor")
    fields["rope_scaling"] = None if of_full["rope_type"] == "default" else of_full
    if fields["model_type"] == "qwen3_moe" and "num_local_experts" in fields:
        fields["num_experts"] = fields.pop("num_local_experts")
    if fields["model_type"] == "glm4_moe" and "num_mtp_layers" in fields:
        fields["num_nextn_predict_layers"] = fields.pop("num_mtp_layers")


def _as_kimi_published(fields: dict[str, Any]) -> None:
    """Layers are numbered from 1; which have experts follows from a number, where the first ones have none."""
    kinds = list(enumerate(fields.pop("layer_types"), 1))
    fields["linear_attn_config"] = {
        "full_attn_layers": [number for number, kind in kinds if kind == "full_attention"],
        "kda_layers": [number for number, kind in kinds if kind == "linear_attention"],
        "head_dim": fields.pop("linear_head_dim"),
        "num_heads": fields.pop("linear_num_heads"),
        "short_conv_kernel_size": fields.pop("linear_conv_kernel_dim"),
    }
    fields |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "rope_scaling": None}
    fields["first_k_dense_replace"] = fields.pop("mlp_layer_types").index("sparse")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_as_saved_is_the_same_model_in_either_spelling(tmp_path: Path, name: str) -> None:
    model = save(tmp_path, name, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _assert_same(tmp_path, model, 4)
    written = load_config(tmp_path)
    _respell(tmp_path, as_transformers_4)
    assert load_config(tmp_path) == written


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_one_file_gives_64_greedy_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    model = save(tmp_path, name)
    _assert_same(tmp_path, model, NUM_TOKENS)


@pytest.mark.parametrize(
    ("architecture", "name", "prefix"),
    [
        ("Gemma3ForConditionalGeneration", "gemma3", "language_model.model."),
        ("Mistral3ForConditionalGeneration", "mistral", "model.language_model."),
        ("LlavaForConditionalGeneration", "llama", "language_model.model."),
    ],
)
def test_the_text_part_of_a_model_that_reads_images_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, name: str, prefix: str
) -> None:
    from safetensors.torch import load_file, save_file

    model = save(tmp_path, name)

    def nest(fields: dict[str, Any]) -> None:
        text = dict(fields)
        fields.clear()
        fields |= {"architectures": [architecture], "dtype": text.pop("dtype"), "text_config": text}
        del text["architectures"]

    _respell(tmp_path, nest)
    path = tmp_path / "model.safetensors"
    text = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else f"language_model.{name}": tensor
        for name, tensor in load_file(path).items()
    }
    save_file({**text, "vision_tower.patches.weight": torch.zeros(3)}, path)
    _assert_same(tmp_path, model, 4)
    assert f"{architecture}: its text part is served, images are not" in caplog.text


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_text_part_of_a_model_with_images_as_saved_is_the_same_model(tmp_path: Path, name: str) -> None:
    model = save_with_images(tmp_path, name)
    decoder = Decoder.load(tmp_path, torch.float32, "cpu")
    expected = oracle_logits(model, PROMPT)
    found = prompt_logits(decoder, PROMPT, len(PROMPT))
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_what_is_not_served_is_refused_by_name_with_the_list_of_what_is() -> None:
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel is not supported") as caught:
        parse_config({"architectures": ["GPT2LMHeadModel"]})
    assert all(architecture in str(caught.value) for architecture in ARCHITECTURES)
