"""Phi 3 and 4: projections that read the same are one in the checkpoint, positions up to LongRoPE."""

from __future__ import annotations

from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import LayerConfig, TensorNames
from shared.model.config.model_config import ModelConfig
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import max_positions, num_layers, read_decoder, read_kv_heads


def phi3(fields: JsonFields) -> ModelConfig:
    """Phi 3, 3.5, 4 and 4 mini."""
    rope = RopeConfig.parse(fields, max_positions(fields), share=1.0)
    num_heads = fields.integer("num_attention_heads")
    return read_decoder(
        fields,
        "Phi3ForCausalLM",
        [LayerConfig(rope, fields.optional_integer("sliding_window"))] * num_layers(fields),
        num_kv_heads=read_kv_heads(fields, num_heads, num_heads),
        names=TensorNames(qkv="self_attn.qkv_proj", gate_up="gate_up_proj"),
    )
