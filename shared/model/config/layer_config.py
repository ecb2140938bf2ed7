"""What differs from layer to layer of a decoder, and the names of a layer's tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.model.config.json_fields import JsonFields
from shared.model.config.rope_config import RopeConfig

QkNorm = Literal["none", "head", "plain", "whole"]
"""RMS norm of queries and keys: none, of each head, likewise without weights and only in layers that encode positions,
or over all heads of a token together."""

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


@dataclass(frozen=True)
class Temperature:
    """A factor on a token's queries that grows with its position p (Nakanishi 2025, arXiv:2501.19399):
    1 + `strength` · log(1 + ⌊(p + `shift`) / `length`⌋)."""

    strength: float
    length: int  # tokens
    shift: int = 0  # tokens


@dataclass(frozen=True)
class LayerConfig:
    """One layer: a mixer of tokens, then a part for each token alone. What all layers share is in `ModelConfig`."""

    rope: RopeConfig | None  # None: positions are not encoded
    window: int | None = None  # tokens that it sees, None for all
    is_chunked: bool = False  # whether `window` counts from its multiples, not back from the token
    temperature: Temperature | None = None  # None: 1
    has_experts: bool = False  # in place of a dense feed-forward block
    has_state: bool = False  # mixes tokens by the state of `ModelConfig.delta`, not by attention


@dataclass(frozen=True)
class TensorNames:
    """How a family names a layer's tensors, where families differ."""

    input_norm: str | None = "input_layernorm"  # before attention; None: the family has none
    attention_norm: str | None = None  # of what attention gives, before it is added
    post_norm: str | None = "post_attention_layernorm"  # before the feed-forward block
    output_norm: str | None = None  # of what the feed-forward block gives, before it is added
    qkv: str | None = None  # of one projection for all three; None: they are apart
    mlp: str = "mlp"  # the dense feed-forward block
    gate_up: str | None = None  # of one projection for both; None: they are apart


PLAIN_NAMES = TensorNames()
AROUND = TensorNames(
    attention_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    output_norm="post_feedforward_layernorm",
)
"""Norms before and after both parts of a layer."""


def layer_kinds(
    fields: JsonFields, num_layers: int, full_every: int | None = None, other: str = SLIDING
) -> tuple[str, ...]:
    """FULL or `other` for each layer: `layer_types`, or else every `sliding_window_pattern`-th layer is FULL, by
    default every `full_every`-th; without that, all are.

    Raises:
        ModelLoadError: other kinds, or not one for each layer.
    """
    every = full_every
    if full_every and not fields.has("layer_types"):
        every = fields.integer("sliding_window_pattern", default=full_every)
    by_default = [other if every and (layer + 1) % every else FULL for layer in range(num_layers)]
    return kinds_of(fields, "layer_types", (FULL, other), by_default)


def kinds_of(fields: JsonFields, name: str, known: Sequence[str], by_default: Sequence[str]) -> tuple[str, ...]:
    """One of `known` for each layer.

    Raises:
        ModelLoadError: other kinds, or not one for each layer.
    """
    kinds = fields.optional_text_list(name)
    if kinds is None:
        return tuple(by_default)
    if len(kinds) != len(by_default):
        raise fields.fault(name, f"must name {len(by_default)} layers, found {len(kinds)}")
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise fields.fault(name, f"{', '.join(unknown)} is not supported")
    return tuple(kinds)


def layers_with_positions(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Which layers encode positions: those of 1 in `no_rope_layers`, or else all but every
    `no_rope_layer_interval`-th, by default every fourth.

    Raises:
        ModelLoadError: fewer numbers than layers.
    """
    found = fields.indices("no_rope_layers")
    if not found:
        every = fields.integer("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if len(found) < num_layers:
        raise fields.fault("no_rope_layers", f"must have {num_layers} numbers, found {len(found)}")
    return tuple(number != 0 for number in found[:num_layers])


def windowed_layers(
    fields: JsonFields, kinds: Sequence[str], window: int | None, ropes: Mapping[str, RopeConfig | None] | RopeConfig
) -> tuple[LayerConfig, ...]:
    """Layers of these kinds, the sliding ones with `window`; `ropes`: of all, or of each kind.

    Raises:
        ModelLoadError: a layer slides, and there is no window.
    """
    if window is None and SLIDING in kinds:
        raise fields.fault("sliding_window", "is missing though layer_types names sliding_attention")
    return tuple(
        LayerConfig(ropes if isinstance(ropes, RopeConfig) else ropes[kind], window if kind == SLIDING else None)
        for kind in kinds
    )
