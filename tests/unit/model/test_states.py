"""Layers with a state: what their configuration says, where their states lie, and what is refused beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ConfigError, ModelLoadError
from shared.kernels.delta_sizes import PartPlaces
from shared.kv.groups import STATE_WINDOW
from shared.model.decoder import Decoder
from shared.model.families.registry import parse_config
from shared.model.layers.parameters import DecoderParameters
from shared.model.ranks.shard import Degrees, Shard, Span
from shared.model.weights.plan import rounding_specs
from shared.rpc.convert import layout_from_proto, layout_to_proto
from tests.integration.engine.families import STATES, write_family

from .paged_run import prompt_logits

STATE, FULL = "linear_attention", "full_attention"
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "torch_dtype": "bfloat16",
}


KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "model_max_length": 1_048_576,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def test_kimis_fields_are_states_that_fade_by_channel_beside_latents_without_positions() -> None:
    config = parse_config(KIMI_LINEAR_48B)
    assert config.kv_groups == ((3, 7, 11, 15, 19, 23, 26),)
    assert [layer.has_experts for layer in config.layers] == [False, *[True] * 26]
    assert config.ropes == (None,)
    assert config.delta is not None
    assert config.delta.state_bytes == 4 * (32 * 128 * 128 + 3 * 3 * 32 * 128)
    layout = config.block_layout(16, "bfloat16")
    assert layout.block_bytes == 7 * 576 * 2 * 16
    assert layout.num_states == -(-20 * config.delta.state_bytes // layout.block_bytes)
    views = DecoderParameters.allocate(config, torch.float32, "meta").checkpoint_views(config)
    assert sum(view.numel() for view in views.values()) == pytest.approx(49.1e9, rel=0.01)


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"num_experts_per_token": 257}, "num_experts_per_tok"),
        ({"num_experts": None}, "num_experts"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"linear_attn_config": {"full_attn_layers": []}}, "layer_types"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ],
)
def test_what_is_no_kimi_linear_is_refused_by_the_files_own_name(own: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        parse_config({**KIMI_LINEAR_48B, **own})
    assert str(refused.value.field).startswith(field)


def test_states_beside_latents_are_split_in_a_pool_that_all_ranks_have() -> None:
    config = parse_config(KIMI_LINEAR_48B)
    assert config.num_state_parts == 8
    own = Shard(config, Degrees(tensor=4), 3).local_config.delta
    assert own is not None
    assert (own.num_key_heads, own.places) == (8, PartPlaces(6, 2, 8))
    with pytest.raises(ConfigError, match="tp is 2, and ranks with pools of their own do not split the states"):
        Degrees(tensor=2).check(config, own_pools=True)
    with pytest.raises(ConfigError, match="pp is 3, and ranks with pools of their own do not split the states"):
        Degrees(pipeline=3).check(parse_config(QWEN3_NEXT_80B), own_pools=True)


def test_the_published_fields_are_three_layers_with_a_state_to_one_with_attention() -> None:
    config = parse_config(QWEN3_NEXT_80B)
    assert [layer.has_state for layer in config.layers] == [True, True, True, False] * 12
    assert config.kv_groups == (tuple(range(3, 48, 4)),)
    assert len(config.state_layers) == 36
    assert [rope.share for rope in config.ropes] == [0.25]
    assert config.moe is not None
    assert (config.moe.shared_size, config.moe.shared, config.moe.routing.is_normalised) == (512, "shared_expert", True)
    assert config.delta is not None
    assert config.delta.state_bytes == 4 * (32 * 128 * 128 + 3 * 8192)


@pytest.mark.parametrize(("block_size", "num_states"), [(16, 201), (64, 51)])
def test_states_take_as_many_groups_as_their_bytes_ask_for(block_size: int, num_states: int) -> None:
    layout = parse_config(QWEN3_NEXT_80B).block_layout(block_size, "bfloat16")
    assert layout.block_bytes == 12 * 2 * 2 * 256 * 2 * block_size
    assert (layout.num_states, layout.windows) == (num_states, (None, *[STATE_WINDOW] * num_states))
    assert (
        (num_states - 1) * layout.block_bytes < 36 * 4 * (32 * 128 * 128 + 3 * 8192) <= num_states * layout.block_bytes
    )
    assert layout_from_proto(layout_to_proto(layout)) == layout
    assert layout.name != parse_config(QWEN3_NEXT_80B).block_layout(block_size, "float16").name


def test_every_fourth_layer_attends_unless_the_file_says_otherwise() -> None:
    fields = {**QWEN3_NEXT_80B, "num_hidden_layers": 6}
    assert parse_config({**fields, "full_attention_interval": 3}).state_layers == (0, 1, 3, 4)
    own = {"layer_types": [FULL, STATE, STATE, STATE, FULL, STATE]}
    assert parse_config({**fields, **own}).state_layers == (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"layer_types": [STATE] * 6}, "layer_types"),
        ({"layer_types": [FULL] * 6}, "layer_types"),
        ({"layer_types": [STATE, "sliding_attention"] * 3}, "layer_types"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_no_such_model_is_refused_by_field(own: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        parse_config({**QWEN3_NEXT_80B, "num_hidden_layers": 6, **own})
    assert refused.value.field == field


def test_a_rank_has_key_heads_with_their_value_heads_beside_its_kv_heads() -> None:
    config = parse_config(QWEN3_NEXT_80B)
    assert config.num_state_parts == 2
    shard = Shard(config, Degrees(tensor=2), 1)
    assert (shard.kv_heads, shard.delta_heads) == (Span(1, 2), Span(8, 16))
    own, whole = shard.local_config, config.block_layout(64, "bfloat16")
    assert own.delta is not None
    assert (own.delta.num_key_heads, own.delta.num_value_heads, own.num_state_parts) == (8, 16, 1)
    part = own.block_layout(64, "bfloat16")
    assert (part.windows, part.num_states, part.block_bytes * 2) == (whole.windows, whole.num_states, whole.block_bytes)


def test_states_are_split_where_kv_heads_are() -> None:
    expected = "tp is 4, and the states of Qwen3NextForCausalLM have 2 parts, each of some of its 16 key heads and 2 KV"
    with pytest.raises(ConfigError, match=expected) as refused:
        Degrees(tensor=4).check(parse_config(QWEN3_NEXT_80B))
    assert refused.value.details == {"field": "tp", "value": 4, "limit": 2}


def test_routers_rates_and_gates_are_not_rounded() -> None:
    config = parse_config({**QWEN3_NEXT_80B, "num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1})
    views = DecoderParameters.allocate(config, torch.float32, "meta").checkpoint_views(config)
    specs = rounding_specs(config, {name: tuple(view.shape) for name, view in views.items()}, "int8")
    of_first = {name.removeprefix("model.layers.0.") for name in specs if name.startswith("model.layers.0.")}
    assert of_first == {
        "linear_attn.in_proj_qkvz.weight",
        "linear_attn.out_proj.weight",
        *(f"mlp.experts.{expert}.{part}_proj.weight" for expert in range(2) for part in ("gate", "up", "down")),
        *(f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    """As Qwen publishes them: [num_experts, 2 * expert_size, hidden_size], gate first."""
    folder = write_family(tmp_path / "model", "qwen3.5-moe")
    prompt = [3 + i * 7 % 200 for i in range(21)]
    expected = prompt_logits(Decoder.load(folder, torch.float32, "cpu"), prompt, 8)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(5)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{prefix}.down_proj"] = parts["down"]
    tensors["mtp.fc.weight"] = torch.zeros(3)  # of a layer that predicts further, which is not read
    save_file(tensors, path)
    assert prompt_logits(Decoder.load(folder, torch.float32, "cpu"), prompt, 8).equal(expected)
    tensors["model.layers.0.mlp.experts.down_proj"] = tensors["model.layers.0.mlp.experts.down_proj"][:4].clone()
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=r"experts\.down_proj has shape \[4, 64, 32\], expected \[5, 64, 32\]"):
        Decoder.load(folder, torch.float32, "cpu")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_projections_in_fewer_bits_change_little(tmp_path: Path, quantization: Any) -> None:
    dense = {**STATES["qwen3-next"][1], "num_experts": 0}  # a router's choice would change
    folder = write_family(tmp_path / "model", "qwen3-next", extra_config=dense)
    prompt = [3 + i * 7 % 200 for i in range(21)]
    plain = prompt_logits(Decoder.load(folder, torch.float32, "cpu"), prompt, 8)
    rounded = Decoder.load(folder, torch.float32, "cpu", quantization=quantization)
    errors = (prompt_logits(rounded, prompt, 8) - plain).norm(dim=1) / plain.norm(dim=1)
    assert 0 < errors.median() < (0.08 if quantization == "int8" else 0.6)
