"""OLMo 2 and 3: norms behind both parts of a layer, and over the queries and keys of all heads together."""

from __future__ import annotations

from collections.abc import Sequence

from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import FULL, SLIDING, LayerConfig, TensorNames, layer_kinds, windowed_layers
from shared.model.config.model_config import ModelConfig
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import (
    attention_biases,
    max_positions,
    num_layers,
    read_decoder,
    read_kv_heads,
)

_NAMES = TensorNames(
    input_norm=None,
    attention_norm="post_attention_layernorm",
    post_norm=None,
    output_norm="post_feedforward_layernorm",
)


def olmo2(fields: JsonFields) -> ModelConfig:
    """OLMo 2."""
    return _olmo(
        fields, "Olmo2ForCausalLM", [LayerConfig(RopeConfig.parse(fields, max_positions(fields)))] * num_layers(fields)
    )


def olmo3(fields: JsonFields) -> ModelConfig:
    """OLMo 3: every fourth layer sees the whole context, whose positions alone are extended."""
    kinds = layer_kinds(fields, num_layers(fields), full_every=4)
    full, theta = RopeConfig.parse(fields, max_positions(fields), FULL, theta=5e5), 5e5
    parameters = fields.child("rope_parameters")
    nested = parameters.child(SLIDING) if parameters is not None else None
    sliding = RopeConfig(theta=full.theta if nested is None else nested.number("rope_theta", default=theta))
    ropes = {FULL: full, SLIDING: sliding}
    window = fields.integer("sliding_window", default=4096)
    return _olmo(fields, "Olmo3ForCausalLM", windowed_layers(fields, kinds, window, ropes))


def _olmo(fields: JsonFields, architecture: str, layers: Sequence[LayerConfig]) -> ModelConfig:
    num_heads = fields.integer("num_attention_heads")
    return read_decoder(
        fields,
        architecture,
        layers,
        num_kv_heads=read_kv_heads(fields, num_heads, num_heads),
        **attention_biases(fields),
        qk_norm="whole",
        names=_NAMES,
    )
