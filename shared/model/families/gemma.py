"""Gemma 2 and 3: norms around both parts of a layer, windows in turns with full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import AROUND, FULL, SLIDING, layer_kinds, windowed_layers
from shared.model.config.model_config import ModelConfig
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import (
    attention_biases,
    max_positions,
    num_layers,
    read_activation,
    read_decoder,
)

_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
"""Published configurations leave out what is as here."""


def gemma2(fields: JsonFields) -> ModelConfig:
    """Gemma 2: scores and logits have bounds."""
    fields = fields.with_values(_DEFAULTS | {"vocab_size": 256_000, "max_position_embeddings": 8192})
    return _gemma(
        fields,
        "Gemma2ForCausalLM",
        RopeConfig.parse(fields, max_positions(fields)),
        full_every=2,
        softcap=fields.optional_number("attn_logit_softcapping") if "attn_logit_softcapping" in fields else 50.0,
        logit_softcap=fields.optional_number("final_logit_softcapping")
        if "final_logit_softcapping" in fields
        else 30.0,
    )


def gemma3(fields: JsonFields) -> ModelConfig:
    """Gemma 3, its text: queries and keys are normalised, and layers that slide have positions of their own."""
    fields = fields.with_values(_DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072})
    longest = max_positions(fields)
    local = fields.number("rope_local_base_freq", default=10_000.0)
    parameters = fields.child("rope_parameters")
    nested = parameters.child(SLIDING) if parameters is not None else None
    sliding = RopeConfig(theta=local) if nested is None else RopeConfig.parse(fields, longest, SLIDING, theta=local)
    ropes = {FULL: RopeConfig.parse(fields, longest, FULL, theta=1e6), SLIDING: sliding}
    cap = fields.optional_number("final_logit_softcapping")
    return _gemma(fields, "Gemma3ForCausalLM", ropes, full_every=6, qk_norm="head", logit_softcap=cap)


def _gemma(
    fields: JsonFields, architecture: str, ropes: Mapping[str, RopeConfig] | RopeConfig, full_every: int, **own: Any
) -> ModelConfig:
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.fault("use_bidirectional_attention", "is not supported: the model generates no text")
    kinds = layer_kinds(fields, num_layers(fields), full_every)
    return read_decoder(
        fields,
        architecture,
        windowed_layers(fields, kinds, fields.optional_integer("sliding_window"), ropes),
        is_tied=True,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        **attention_biases(fields),
        query_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        norm_offset=1.0,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        names=AROUND,
        **own,
    )
