"""The modules of a model that an adapter can add to, and where each lies among the fused projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig
from shared.model.layers.fused_rows import delta_out, gate_up_rows, qkv_rows, rate_rows

if TYPE_CHECKING:  # the command line reads this file, without torch
    from shared.kernels.lora.step import Projection


@dataclass(frozen=True, slots=True)
class Target:
    """One module of a checkpoint."""

    layer: int
    projection: Projection  # or of the expert, where it is one's
    begin: int  # its first output among those of the projection
    num_outputs: int
    in_size: int
    expert: int | None = None  # its id; None: of a projection that every token passes


def adapter_targets(config: ModelConfig) -> dict[str, Target]:
    """Module name, as in a checkpoint of text alone → where it lies. Without routers, and experts of one tensor, which
    are no targets; empty for a model whose attention is over latents. Where a layer has a state, its rates and decays
    are the last outputs of `qkv`."""
    if config.latent is not None:
        return {}
    hidden, inner = config.hidden_size, config.intermediate_size
    found: dict[str, Target] = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        fused: list[tuple[Projection, dict[str, int], int]] = [
            ("qkv", qkv_rows(config, layer), hidden),
            ("o", {"self_attn.o_proj": hidden}, config.num_heads * config.head_dim),
        ]
        if config.layers[layer].has_state and config.delta is not None:
            of_qkv = qkv_rows(config, layer) | rate_rows(config.delta)
            fused = [("qkv", of_qkv, hidden), ("o", {delta_out(config.delta): hidden}, config.delta.value_size)]
        moe = config.moe if config.has_experts(layer) else None
        mlp, size = (config.names.mlp, inner) if moe is None else (f"{moe.prefix}.{moe.shared}", moe.shared_size)
        if size:
            fused += [
                ("gate_up", gate_up_rows(config, mlp, size), hidden),
                ("down", {f"{mlp}.down_proj": hidden}, size),
            ]
        for projection, rows, in_size in fused:
            begin = 0
            for name, num_outputs in rows.items():
                found[prefix + name] = Target(layer, projection, begin, num_outputs, in_size)
                begin += num_outputs
        if moe is not None and moe.stacked is None:
            found |= _of_experts(moe, layer, prefix, hidden)
    return found


def values_of_rank(config: ModelConfig) -> int:
    """Numbers of an adapter of rank 1 that adds to all targets; 0 where there are none."""
    return sum(target.in_size + target.num_outputs for target in adapter_targets(config).values())


def _of_experts(moe: MoeConfig, layer: int, prefix: str, hidden: int) -> dict[str, Target]:
    gate, up, down = moe.projections
    found: dict[str, Target] = {}
    for expert in range(moe.routing.num_experts):
        name = f"{prefix}{moe.prefix}.experts.{expert}."
        found[name + gate] = Target(layer, "gate_up", 0, moe.expert_size, hidden, expert)
        found[name + up] = Target(layer, "gate_up", moe.expert_size, moe.expert_size, hidden, expert)
        found[name + down] = Target(layer, "down", 0, hidden, moe.expert_size, expert)
    return found
