"""Llama, and Granite, which is Llama with multipliers (IBM 2024)."""

from __future__ import annotations

from typing import Any

from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import LayerConfig
from shared.model.config.model_config import ModelConfig
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import (
    attention_biases,
    max_positions,
    num_layers,
    read_decoder,
    read_kv_heads,
)


def llama(fields: JsonFields) -> ModelConfig:
    """Llama 1 to 3."""
    return _llama(fields, "LlamaForCausalLM")


def granite(fields: JsonFields) -> ModelConfig:
    """Granite 3 and later, dense."""
    return _llama(
        fields,
        "GraniteForCausalLM",
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        query_scale=fields.number("attention_multiplier", default=1.0),
        logit_scale=1 / fields.number("logits_scaling", default=1.0),
    )


def _llama(fields: JsonFields, architecture: str, **own: Any) -> ModelConfig:
    rope = RopeConfig.parse(fields, max_positions(fields))
    num_heads = fields.integer("num_attention_heads")
    return read_decoder(
        fields,
        architecture,
        [LayerConfig(rope)] * num_layers(fields),
        num_kv_heads=read_kv_heads(fields, num_heads, num_heads),  # Llama 1 and 2 omit the field
        **attention_biases(fields),
        mlp_bias=fields.boolean("mlp_bias", default=False),
        **own,
    )
