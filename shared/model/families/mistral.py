"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from shared.kernels.experts.routing_rules import Routing
from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import SLIDING, LayerConfig, Temperature, layer_kinds, windowed_layers
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig, chosen_experts
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import max_positions, num_layers, read_decoder

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What a configuration without positions means."""
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


def ministral3(fields: JsonFields) -> ModelConfig:
    """Ministral 3 and Mistral Small since: queries grow with their position."""
    fields = fields.with_values({"max_position_embeddings": 262_144, "head_dim": 128})
    if not fields.has("rope_scaling"):
        fields = fields.with_values({"rope_parameters": _MINISTRAL3_ROPE})
    longest = max_positions(fields)
    rope = RopeConfig.parse(fields, longest, theta=1e6)
    scaling = fields.child("rope_scaling") or fields.child("rope_parameters")
    strength = None if scaling is None else scaling.optional_number("llama_4_scaling_beta")
    trained = rope.original_max_position_embeddings or longest
    temperature = None if strength is None else Temperature(strength, trained)
    layer = LayerConfig(rope, fields.optional_integer("sliding_window"), temperature=temperature)
    return read_decoder(fields, "Ministral3ForCausalLM", [layer] * num_layers(fields))


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
