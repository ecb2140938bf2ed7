"""The part of a model's `config.json` that describes its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.kernels.experts.routing_rules import Routing
from shared.model.config.json_fields import JsonFields

Stacking = Literal["turns", "halves"]
"""How the rows of gate and up lie in one tensor: by turns, or all of gate first."""


@dataclass(frozen=True)
class MoeConfig:
    """Experts in place of the feed-forward block of some layers.

    Its creator makes sure of what `Routing` asks for.
    """

    routing: Routing
    expert_size: int  # intermediate size of an expert
    shared_size: int = 0  # of what every token passes besides, 0 where there is none
    fp32_router: bool = False  # whether logits are computed in fp32 whatever the model's dtype
    prefix: str = "mlp"  # of a layer's tensors in a checkpoint
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names there of gate, up and down
    router: str = "gate"
    shared: str = "shared_experts"
    shared_gate: str | None = None  # of what weighs the shared ones, by a sigmoid; None: they count in full
    stacked: Stacking | None = None  # of one tensor of all experts' weights, inputs first; None: they are apart
    scales_inputs: bool = False  # whether a token's weight multiplies what an expert reads, not what it gives
    has_bias: bool = False  # of the router and of each projection


def chosen_experts(fields: JsonFields, num_experts: int, most: int | None = None) -> int:
    """Experts of a token, out of `most` that it can choose from, by default all.

    Raises:
        ModelLoadError: missing, or more than `most`.
    """
    most = num_experts if most is None else most
    top_k = fields.integer("num_experts_per_tok")
    if top_k > most:
        of = f"{num_experts} experts" if most == num_experts else f"the {most} experts of a token's groups"
        raise fields.fault("num_experts_per_tok", f"must be at most {of}, found {top_k}")
    return top_k
