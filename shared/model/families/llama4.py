"""Llama 4, its text: chunks in turns with layers that see all and encode no positions, and experts."""

from __future__ import annotations

from dataclasses import replace

from shared.kernels.experts.routing_rules import Routing
from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import (
    CHUNKED,
    FULL,
    LayerConfig,
    Temperature,
    TensorNames,
    layer_kinds,
    layers_with_positions,
)
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig, chosen_experts
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import attention_biases, max_positions, num_layers, read_decoder


def llama4(fields: JsonFields) -> ModelConfig:
    """Llama 4 Scout and Maverick."""
    defaults = {
        "intermediate_size_mlp": 16384,
        "attention_chunk_size": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    }
    fields = fields.with_values(defaults | {"max_position_embeddings": 131_072, "head_dim": 128})
    num_experts, expert_size = fields.integer("num_local_experts"), fields.integer("intermediate_size")
    routing = Routing(num_experts, chosen_experts(fields, num_experts), "sigmoid", is_normalised=False)
    moe = MoeConfig(
        routing, expert_size, expert_size, prefix="feed_forward", router="router", shared="shared_expert",
        stacked="halves", scales_inputs=True,
    )  # fmt: skip
    layers = _layers(fields)
    return read_decoder(
        fields,
        "Llama4ForCausalLM",
        layers,
        intermediate_size=fields.integer("intermediate_size_mlp"),
        **attention_biases(fields),
        qk_norm="plain" if fields.boolean("use_qk_norm", default=True) else "none",
        is_interleaved=True,
        names=TensorNames(mlp="feed_forward"),
        moe=moe if any(layer.has_experts for layer in layers) else None,
    )


def _layers(fields: JsonFields) -> list[LayerConfig]:
    count = num_layers(fields)
    rope = RopeConfig.parse(fields, max_positions(fields), theta=5e5)
    has_positions = layers_with_positions(fields, count)
    kinds = tuple(CHUNKED if has else FULL for has in has_positions)
    if fields.has("layer_types"):
        kinds = layer_kinds(fields, count, other=CHUNKED)
    every = fields.integer("interleave_moe_layer_step", default=1)
    experts = fields.indices("moe_layers") if fields.has("moe_layers") else range(every - 1, count, every)
    length, strength = fields.integer("floor_scale", default=8192), fields.number("attn_scale", default=0.1)
    # Early checkpoints have a number of layers there, later ones true or false.
    is_tuned = bool(fields.raw("attn_temperature_tuning")) or "attn_temperature_tuning" not in fields
    full = LayerConfig(None, temperature=Temperature(strength, length, shift=1) if is_tuned else None)
    chunk = fields.integer("attention_chunk_size") if CHUNKED in kinds else None
    return [
        replace(
            LayerConfig(rope) if has else full,
            window=chunk if kind == CHUNKED else None,
            is_chunked=kind == CHUNKED,
            has_experts=layer in experts,
        )
        for layer, (has, kind) in enumerate(zip(has_positions, kinds, strict=True))
    ]
