"""SmolLM 3: some layers do not encode positions."""

from __future__ import annotations

from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import FULL, SLIDING, LayerConfig, layer_kinds, layers_with_positions
from shared.model.config.model_config import ModelConfig
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import attention_biases, max_positions, num_layers, read_decoder


def smollm3(fields: JsonFields) -> ModelConfig:
    """SmolLM 3: layers without positions are those that slide, where any do."""
    rope, count = RopeConfig.parse(fields, max_positions(fields), theta=2e6), num_layers(fields)
    has_positions = layers_with_positions(fields, count)
    slides = fields.boolean("use_sliding_window", default=False)
    window = fields.optional_integer("sliding_window") if slides else None
    kinds = tuple(FULL if has else SLIDING for has in has_positions)
    if fields.has("layer_types"):
        kinds = layer_kinds(fields, count)
    layers = [
        LayerConfig(rope if has else None, window if kind == SLIDING else None)
        for has, kind in zip(has_positions, kinds, strict=True)
    ]
    return read_decoder(
        fields,
        "SmolLM3ForCausalLM",
        layers,
        is_tied=True,
        **attention_biases(fields),
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )
