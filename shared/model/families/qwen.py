"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from shared.kernels.experts.routing_rules import Routing
from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import LayerConfig, layer_kinds, windowed_layers
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig, chosen_experts
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import (
    attention_biases,
    max_positions,
    num_layers,
    read_decoder,
    read_head_dim,
)

_DEFAULT_HEAD_DIM = 128
_DEFAULT_WINDOW = 4096


def qwen2(fields: JsonFields) -> ModelConfig:
    """Qwen 2 and 2.5: queries, keys and values have biases."""
    return read_decoder(fields, "Qwen2ForCausalLM", _dense_layers(fields), qkv_bias=True)


def qwen3(fields: JsonFields) -> ModelConfig:
    """Qwen 3: queries and keys are normalised."""
    return _qwen3(fields, "Qwen3ForCausalLM", _dense_layers(fields), None)


def qwen3_moe(fields: JsonFields) -> ModelConfig:
    """Qwen 3 with experts."""
    # transformers 5.23 writes Mixtral's name for it, earlier releases and the published checkpoints the other.
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    num_experts = fields.integer(name, minimum=0)
    every = fields.integer("decoder_sparse_step", default=1)
    dense = fields.indices("mlp_only_layers")
    is_windowed = fields.boolean("use_sliding_window", default=False)
    window = fields.integer("sliding_window", default=_DEFAULT_WINDOW) if is_windowed else None
    plain = LayerConfig(RopeConfig.parse(fields, max_positions(fields)), window)
    layers = [
        replace(plain, has_experts=num_experts > 0 and layer not in dense and (layer + 1) % every == 0)
        for layer in range(num_layers(fields))
    ]
    if not any(layer.has_experts for layer in layers):
        return _qwen3(fields, "Qwen3MoeForCausalLM", layers, None)
    is_normalised = fields.boolean("norm_topk_prob", default=False)
    routing = Routing(num_experts, chosen_experts(fields, num_experts), "softmax", is_normalised)
    moe = MoeConfig(routing, fields.integer("moe_intermediate_size"))
    return _qwen3(fields, "Qwen3MoeForCausalLM", layers, moe)


def _qwen3(
    fields: JsonFields, architecture: str, layers: tuple[LayerConfig, ...] | list[LayerConfig], moe: MoeConfig | None
) -> ModelConfig:
    head_dim = read_head_dim(fields, _DEFAULT_HEAD_DIM)
    return read_decoder(
        fields, architecture, layers, head_dim=head_dim, **attention_biases(fields), qk_norm="head", moe=moe
    )


def _dense_layers(fields: JsonFields) -> tuple[LayerConfig, ...]:
    """Layers from a given one on slide, where any do."""
    rope, count = RopeConfig.parse(fields, max_positions(fields)), num_layers(fields)
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window", False) else None
    if fields.has("layer_types"):
        return windowed_layers(fields, layer_kinds(fields, count), window, rope)
    num_full = count if window is None else fields.integer("max_window_layers", 28, minimum=0)
    return tuple(LayerConfig(rope, None if layer < num_full else window) for layer in range(count))
