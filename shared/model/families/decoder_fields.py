"""What most families spell alike in `config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.kernels.activation.activations import GELU, SILU, Activation
from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import LayerConfig
from shared.model.config.model_config import ModelConfig
from shared.model.config.rope_config import RopeConfig

MOST_LAYERS = 4096
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU}


def read_decoder(
    fields: JsonFields,
    architecture: str,
    layers: Sequence[LayerConfig],
    *,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    eps: str = "rms_norm_eps",
    is_tied: bool = False,
    activation: Activation | None = None,
    **own: Any,
) -> ModelConfig:
    """A decoder with these layers.

    Args:
        fields: of `config.json`.
        architecture: its name there.
        layers: all of them.
        head_dim: where it does not follow from the fields.
        num_kv_heads: likewise.
        eps: name of the norms' epsilon.
        is_tied: whether the embedding is the output projection too where the file does not say.
        activation: of the feed-forward blocks, where `hidden_act` does not say.
        own: further fields of `ModelConfig`, or others than those read here.

    Raises:
        ModelLoadError: a missing, wrong or unsupported field; `field` names it.
    """
    num_heads = fields.integer("num_attention_heads")
    read = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or read_kv_heads(fields, num_heads),
        "head_dim": head_dim or read_head_dim(fields),
        "rms_norm_eps": fields.number(eps, default=1e-6),
        "max_position_embeddings": max_positions(fields),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=is_tied),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "dtype": _dtype(fields),
        "activation": activation or read_activation(fields, "hidden_act"),
    }
    model = ModelConfig(architecture=architecture, layers=tuple(layers), **{**read, **own})
    for rope in model.ropes:
        if rope is not None:
            _check_rotated(fields, rope, model.rotary_dim)
    return model


def _check_rotated(fields: JsonFields, rope: RopeConfig, head_dim: int) -> None:
    rotated = rope.rotated(head_dim)
    if rotated % 2:
        raise fields.fault(
            "partial_rotary_factor", f"must rotate an even number of a head's {head_dim} elements, found {rotated}"
        )
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.type == "longrope" and len(factors) != rotated // 2:
            raise fields.fault("rope_scaling", f"must have {rotated // 2} of {name}, found {len(factors)}")


def num_layers(fields: JsonFields) -> int:
    """Layers that a token passes."""
    return fields.integer("num_hidden_layers", maximum=MOST_LAYERS)


def attention_biases(fields: JsonFields) -> dict[str, Any]:
    """`qkv_bias` and `o_bias`, where one field says both."""
    has_bias = fields.boolean("attention_bias", default=False)
    return {"qkv_bias": has_bias, "o_bias": has_bias}


def dense_first(rope: RopeConfig, num_layers: int, num_dense: int) -> list[LayerConfig]:
    """Layers with experts, but for the first ones."""
    return [LayerConfig(rope, has_experts=layer >= num_dense) for layer in range(num_layers)]


def max_positions(fields: JsonFields) -> int:
    """The longest text, in tokens."""
    return fields.integer("max_position_embeddings")


def read_activation(fields: JsonFields, name: str, default: str = "silu") -> Activation:
    """The activation of the feed-forward blocks."""
    found = fields.text(name, default=default)
    if found not in ACTIVATIONS:
        raise fields.fault(name, f"{found!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[found]


def read_kv_heads(fields: JsonFields, num_heads: int, default: int | None = None) -> int:
    """KV heads, which divide the heads; without `default` the file must name them."""
    num_kv_heads = fields.integer("num_key_value_heads", default=default)
    if num_heads % num_kv_heads:
        raise fields.fault("num_key_value_heads", f"must divide {num_heads} heads, found {num_kv_heads}")
    return num_kv_heads


def read_head_dim(fields: JsonFields, default: int | None = None) -> int:
    """Elements of a head: an even number; by default the hidden size over the heads."""
    if default is None and not fields.has("head_dim"):
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise fields.fault("hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads")
        default = hidden_size // num_heads
    head_dim = fields.integer("head_dim", default=default)
    if head_dim % 2:
        raise fields.fault("head_dim", f"must be even for rotary positions, found {head_dim}")
    return head_dim


def _dtype(fields: JsonFields) -> str:
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32")).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise fields.fault("dtype", f"{name!r} is not supported; supported: {', '.join(SUPPORTED_DTYPES)}")
    return name
