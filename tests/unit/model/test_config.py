"""What `ModelConfig` makes of `config.json`, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelLoadError
from shared.model.config.layer_config import LayerConfig
from shared.model.config.model_config import ModelConfig, RopeConfig
from shared.model.families.registry import load_config, parse_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _parse(**fields: Any) -> ModelConfig:
    return parse_config({**BASE, **fields})


def _rope(**fields: Any) -> RopeConfig:
    (rope,) = _parse(**fields).ropes
    assert rope is not None
    return rope


def _windows(**fields: Any) -> list[int | None]:
    return [layer.window for layer in _parse(**fields).layers]


def test_minimal_llama_takes_the_families_defaults() -> None:
    config = _parse()
    assert config.head_dim == 8
    assert config.rms_norm_eps == 1e-6
    assert config.layers == (LayerConfig(RopeConfig(type="default", theta=10_000.0)),) * 4
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False, False, False, "none")
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert config.dtype == "float32"


def test_families_differ_in_biases_and_norms() -> None:
    qwen2 = _parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, "none")
    qwen3 = _parse(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, "head")
    assert _parse(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    llama = _parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    mistral = _parse(architectures=["MistralForCausalLM"], attention_bias=True)
    assert not mistral.qkv_bias


def test_sliding_windows_by_family() -> None:
    assert _windows(sliding_window=9) == [None] * 4
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert _windows(**mistral, sliding_window=9) == [9] * 4
    assert _windows(**mistral, sliding_window=None) == [None] * 4
    assert _windows(**mistral) == [4096] * 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    assert _windows(**qwen) == [None] * 4
    assert _windows(**qwen, use_sliding_window=True, max_window_layers=3) == [None, None, None, 9]
    assert _windows(**qwen, use_sliding_window=True) == [None] * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert _windows(**qwen, use_sliding_window=True, layer_types=kinds) == [9, None, 9, None]


def test_rope_in_old_and_new_spelling() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = _rope(
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", "original_max_position_embeddings": 64, **scaling},
    )
    new = _rope(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "original_max_position_embeddings": 64,
            **scaling,
        }
    )
    assert old == new
    assert old == RopeConfig("llama3", 5e5, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    oldest = _rope(rope_scaling={"type": "linear", "factor": 2})
    assert (oldest.type, oldest.factor) == ("linear", 2.0)
    assert _rope(rope_scaling={"type": "dynamic", "factor": 2}).original_max_position_embeddings == 256
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert _rope(rope_scaling=yarn).factor == 4.0


def test_end_tokens_of_both_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 7, "torch_dtype": "float16"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 7]}))
    config = load_config(tmp_path)
    assert config.eos_token_ids == (8, 7)
    assert config.dtype == "float16"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures",
            "GPT2LMHeadModel is not supported; supported: Llama",
        ),
        ({"architectures": None}, "architectures", "none is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method", "is missing"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size", "is missing"),
        ({"hidden_size": "64"}, "hidden_size", "must be an integer, found '64'"),
        ({"hidden_size": 60}, "hidden_size", "not a multiple of 8"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "at least 1"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers", "at most 4096"),
        (
            {"max_position_embeddings": 10**400, "rope_scaling": {"rope_type": "yarn"}},
            "max_position_embeddings",
            "at most",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_size": 10**400}, "hidden_size", "at most"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "must divide 8"),
        ({"head_dim": 9}, "head_dim", "even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "above zero"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps", "must be a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps", "must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id", "token id"),
        ({"dtype": "float8"}, "dtype", "supported: float32"),
        ({"rope_scaling": "linear"}, "rope_scaling", "must be an object"),
        (
            {"rope_scaling": {"rope_type": "mrope"}},
            "rope_scaling.rope_type",
            "'mrope' is not supported",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "is missing"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                }
            },
            "rope_parameters.high_freq_factor",
            "above low_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not supported"),
        (
            {"architectures": ["Glm4ForCausalLM"], "head_dim": 8, "partial_rotary_factor": 0.4},
            "partial_rotary_factor",
            "an even number of a head's 8 elements, found 3",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
            "rope_scaling",
            "must have 4 of short_factor, found 3",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 1}},
            "rope_scaling.original_max_position_embeddings",
            "at least 2",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_scaling.rope_theta", "must not be 1"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types",
            "must name 4 layers",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 4},
            "layer_types",
            "linear_attention is not supported",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            "sliding_window",
            "is missing though",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": None},
            "num_key_value_heads",
            "is missing",
        ),
    ],
)
def test_unsupported_or_wrong_fields_are_named(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        _parse(**fields)
    assert caught.value.field == field


def test_missing_folder_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json is missing") as caught:
        load_config(tmp_path)
    assert caught.value.details["file"] == "config.json"
    for broken in ("{", '{"x":' + "[" * 100_000, '{"x":' + "9" * 10_000 + "}"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
            load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="expected a JSON object"):
        load_config(tmp_path)


MOE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV2": {
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
}
MOE["DeepseekV3"] = {**MOE["DeepseekV2"], "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _parse_moe(family: str, **fields: Any) -> ModelConfig:
    return _parse(**{"architectures": [f"{family}ForCausalLM"], **MOE[family], **fields})


def test_layers_with_experts_by_family() -> None:
    def layers(family: str, **fields: Any) -> list[bool]:
        return [layer.has_experts for layer in _parse_moe(family, **fields).layers]

    assert layers("Mixtral") == [True] * 4
    assert layers("Qwen3Moe", decoder_sparse_step=2, mlp_only_layers=[3]) == [False, True, False, False]
    assert _parse_moe("Qwen3Moe", num_experts=0).moe is None
    assert _parse_moe("Qwen3Moe", mlp_only_layers=[0, 1, 2, 3]).moe is None
    deepseek = _parse_moe("DeepseekV2")
    assert deepseek.moe is not None
    assert deepseek.moe.shared_size == 32
    assert layers("DeepseekV2") == [False, True, True, True]


def test_latents_are_one_plane_of_the_cache() -> None:
    layout = _parse_moe("DeepseekV3").block_layout(16, "bfloat16")
    assert layout.shape(5) == (5, 4, 1, 1, 2 * 16 * 24)
    assert layout.block_bytes == 4 * 16 * 24 * 2
    assert layout.format.name == "bfloat16-latent"


def test_the_scale_of_latent_attention_follows_yarn() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
    plain, yarn = _parse_moe("DeepseekV2"), _parse_moe("DeepseekV2", rope_scaling=rope)
    assert plain.attention_scale == 0.25
    assert yarn.attention_scale == pytest.approx(0.25 * (0.1 * math.log(4.0) + 1.0) ** 2)


@pytest.mark.parametrize(
    ("family", "fields", "field", "words"),
    [
        ("Mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok", "at most 8 experts, found 9"),
        ("Mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok", "is missing"),
        ("Qwen3Moe", {"mlp_only_layers": 1}, "mlp_only_layers", "list of integers"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step", "at least 1"),
        ("DeepseekV2", {"n_group": 3}, "n_group", "must divide 8 experts, found 3"),
        ("DeepseekV2", {"topk_group": 5}, "topk_group", "at most 4 groups, found 5"),
        ("DeepseekV2", {"num_experts_per_tok": 5}, "num_experts_per_tok", "the 4 experts of a token's groups"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method", "supported: greedy"),
        ("DeepseekV2", {"scoring_func": "sigmoid"}, "scoring_func", "supported: softmax"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob", "not supported"),
        ("DeepseekV2", {"moe_layer_freq": 2}, "moe_layer_freq", "other than 1"),
        ("DeepseekV2", {"kv_lora_rank": None}, "kv_lora_rank", "is missing"),
        ("DeepseekV3", {"n_group": 8, "topk_group": 4}, "n_group", "must leave 2 of 8 experts"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim", "even"),
        ("DeepseekV3", {"q_lora_rank": 0}, "q_lora_rank", "at least 1"),
    ],
)
def test_wrong_fields_of_experts_and_latents_are_named(
    family: str, fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        _parse_moe(family, **fields)
    assert caught.value.field == field


LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "no_rope_layers": [],
    "interleave_moe_layer_step": 2,
    "attn_temperature_tuning": 4,
    "attention_chunk_size": 8192,
}


def test_llama_4_is_read_as_it_was_published() -> None:
    config = parse_config(LLAMA4)
    assert [layer.window for layer in config.layers] == [8192, 8192, 8192, None] * 2
    assert [layer.is_chunked for layer in config.layers] == [True, True, True, False] * 2
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 2
    assert [layer.temperature is None for layer in config.layers] == [True, True, True, False] * 2
    assert [layer.has_experts for layer in config.layers] == [False, True] * 4
    assert (config.intermediate_size, config.moe and config.moe.expert_size) == (48, 16)
    assert parse_config({**LLAMA4, "attn_temperature_tuning": False}).temperatures == ()
    assert parse_config({**LLAMA4, "moe_layers": []}).moe is None


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"attention_chunk_size": None}, "attention_chunk_size"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
    ],
)
def test_what_is_wrong_of_llama_4_is_named(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse_config({**LLAMA4, **wrong})
    assert caught.value.field == field
