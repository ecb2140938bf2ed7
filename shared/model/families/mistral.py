"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from shared.kernels.experts.rules import Routing
from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import SLIDING, LayerConfig, layer_kinds, windowed_layers
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig, chosen_experts
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import max_positions, num_layers, read_decoder

_DEFAULT_WINDOW = 4096  # the first Mistral checkpoints omit the field and mean this


def mistral(fields: JsonFields) -> ModelConfig:
    """Mistral 7B, Nemo and Small: one window, or none, for all layers."""
    if len(set(layer_kinds(fields, num_layers(fields)))) > 1:
        raise fields.fault("layer_types", "mixing kinds of attention is not supported for this architecture")
    window = fields.optional_integer("sliding_window") if "sliding_window" in fields else _DEFAULT_WINDOW
    rope = RopeConfig.parse(fields, max_positions(fields))
    return read_decoder(fields, "MistralForCausalLM", [LayerConfig(rope, window)] * num_layers(fields))


def ministral(fields: JsonFields) -> ModelConfig:
    """Ministral 8B: a window for some layers."""
    window, count = fields.optional_integer("sliding_window"), num_layers(fields)
    kinds = layer_kinds(fields, count) if fields.has("layer_types") or window is None else (SLIDING,) * count
    layers = windowed_layers(fields, kinds, window, RopeConfig.parse(fields, max_positions(fields)))
    return read_decoder(fields, "MinistralForCausalLM", layers)


def mixtral(fields: JsonFields) -> ModelConfig:
    """Mixtral 8x7B and 8x22B."""
    num_experts = fields.integer("num_local_experts", default=8)
    layer = LayerConfig(
        RopeConfig.parse(fields, max_positions(fields)), fields.optional_integer("sliding_window"), has_experts=True
    )
    moe = MoeConfig(
        routing=Routing(num_experts, chosen_experts(fields, num_experts), "softmax", is_normalised=True),
        expert_size=fields.integer("intermediate_size"),
        prefix="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return read_decoder(fields, "MixtralForCausalLM", [layer] * num_layers(fields), moe=moe)
