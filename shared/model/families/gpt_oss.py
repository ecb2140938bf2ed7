"""gpt-oss: attention sinks, windows in turns with full attention, experts with biases."""

from __future__ import annotations

from dataclasses import replace

from shared.kernels.activation.activations import Activation
from shared.kernels.experts.routing_rules import Routing
from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import layer_kinds, windowed_layers
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig, chosen_experts
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import max_positions, num_layers, read_decoder


def gpt_oss(fields: JsonFields) -> ModelConfig:
    """gpt-oss 20B and 120B, in 16 or 32 bits."""
    num_experts = fields.integer("num_local_experts" if fields.has("num_local_experts") else "num_experts")
    routing = Routing(num_experts, chosen_experts(fields, num_experts), "softmax", is_normalised=True)
    limit = fields.number("swiglu_limit", default=7.0)
    has_bias = fields.boolean("attention_bias", default=True)
    rope = RopeConfig.parse(fields, max_positions(fields), theta=150_000.0)
    window = fields.optional_integer("sliding_window")
    layers = windowed_layers(fields, layer_kinds(fields, num_layers(fields), full_every=2), window, rope)
    return read_decoder(
        fields,
        "GptOssForCausalLM",
        [replace(layer, has_experts=True) for layer in layers],
        activation=Activation("clamped", fields.number("swiglu_alpha", default=1.702), limit),
        qkv_bias=has_bias,
        o_bias=has_bias,
        has_sinks=True,
        moe=MoeConfig(routing, fields.integer("intermediate_size"), router="router", stacked="turns", has_bias=True),
    )
