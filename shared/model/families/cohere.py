"""Command R7B, Command A and later: attention and feed-forward block read the same, behind a layer norm."""

from __future__ import annotations

from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import FULL, SLIDING, TensorNames, layer_kinds, windowed_layers
from shared.model.config.model_config import ModelConfig
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import (
    attention_biases,
    max_positions,
    num_layers,
    read_decoder,
    read_kv_heads,
)


def cohere2(fields: JsonFields) -> ModelConfig:
    """Cohere 2: windows, but for every fourth layer, which does not encode positions."""
    fields = fields.with_values({"sliding_window": 4096, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5})
    rope = RopeConfig.parse(fields, max_positions(fields))
    kinds = layer_kinds(fields, num_layers(fields), full_every=4)
    num_heads = fields.integer("num_attention_heads")
    return read_decoder(
        fields,
        "Cohere2ForCausalLM",
        windowed_layers(fields, kinds, fields.optional_integer("sliding_window"), {SLIDING: rope, FULL: None}),
        num_kv_heads=read_kv_heads(fields, num_heads, num_heads),
        eps="layer_norm_eps",
        is_tied=True,
        **attention_biases(fields),
        logit_scale=fields.number("logit_scale", default=0.0625),
        is_interleaved=True,
        is_centered=True,
        is_parallel=True,
        names=TensorNames(post_norm=None),
    )
