"""Which projections of a layer read one input, and what gives it: a factor on their columns can be taken back there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.kernels.lora.step import Projection
from shared.model.config.model_config import ModelConfig


@dataclass(frozen=True)
class Rows:
    """Rows of a projection that give an input, each read by several columns where heads share keys and values."""

    module: str
    first: int
    count: int
    out_size: int
    repeats: int = 1
    """Number of adjacent column groups that read each run of rows."""
    run: int = 1
    """Rows of a run that is read as a whole."""


@dataclass(frozen=True)
class Pair:
    """Projections and what gives their input."""

    input: Projection
    readers: tuple[str, ...]
    """Modules."""
    giver: str | Rows
    """The name of a norm's weight, or rows of a projection."""


def pairs_of(config: ModelConfig, layer: int) -> Iterator[Pair]:
    """The pairs of a layer's attention, unless it is over latents, and of its feed-forward block, if it is dense."""
    if config.latent is not None:
        return
    names, prefix = config.names, f"model.layers.{layer}."
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = names.qkv is not None
    qkv = (f"{prefix}{names.qkv}",) if fused else tuple(f"{prefix}self_attn.{name}_proj" for name in "qkv")
    if names.input_norm is not None and not config.is_parallel:  # else two projections read it
        yield Pair("qkv", qkv, f"{prefix}{names.input_norm}.weight")
    first = q_size + kv_size if fused else 0
    heads = config.num_heads // config.num_kv_heads
    values = Rows(qkv[-1], first, kv_size, first + kv_size, heads, config.head_dim)
    yield Pair("o", (f"{prefix}self_attn.o_proj",), values)
    if config.has_experts(layer) or config.activation.gate == "clamped":
        return
    inner, fused = config.intermediate_size, names.gate_up is not None
    gate_up = (
        (f"{prefix}{names.mlp}.{names.gate_up}",)
        if fused
        else tuple(f"{prefix}{names.mlp}.{name}_proj" for name in ("gate", "up"))
    )
    if names.post_norm is not None:
        yield Pair("gate_up", gate_up, f"{prefix}{names.post_norm}.weight")
    first = inner if fused else 0
    yield Pair("down", (f"{prefix}{names.mlp}.down_proj",), Rows(gate_up[-1], first, inner, first + inner))
