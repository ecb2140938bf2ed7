"""The modules of a model that an adapter can add to, and where each lies among the fused projections."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kernels.lora.step import Projection
from shared.model.config.model_config import ModelConfig
from shared.model.layers.parameters import gate_up_rows, qkv_rows


@dataclass(frozen=True, slots=True)
class Target:
    """One module of a checkpoint."""

    layer: int
    projection: Projection
    begin: int  # its first output among those of the projection
    num_outputs: int
    in_size: int


def adapter_targets(config: ModelConfig) -> dict[str, Target]:
    """Module name, as in a checkpoint of text alone → where it lies. Without attention over latents and experts, which
    are no targets; empty for a model whose attention is over latents, or with layers that have a state."""
    if config.latent is not None or config.delta is not None:
        return {}
    hidden, heads, inner = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    found: dict[str, Target] = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        fused: list[tuple[Projection, dict[str, int], int]] = [
            ("qkv", qkv_rows(config), hidden),
            ("o", {"self_attn.o_proj": hidden}, heads),
        ]
        if not config.has_experts(layer):
            fused += [
                ("gate_up", gate_up_rows(config, config.names.mlp, inner), hidden),
                ("down", {f"{config.names.mlp}.down_proj": hidden}, inner),
            ]
        for projection, rows, in_size in fused:
            begin = 0
            for name, num_outputs in rows.items():
                found[prefix + name] = Target(layer, projection, begin, num_outputs, in_size)
                begin += num_outputs
    return found
