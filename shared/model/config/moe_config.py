"""The part of a model's `config.json` that describes its experts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kernels.experts.rules import Routing, Scoring
from shared.model.config.json_fields import JsonFields


@dataclass(frozen=True)
class MoeConfig:
    """Experts in place of the feed-forward block of some layers.

    `parse` makes sure of what `Routing` asks for.
    """

    routing: Routing
    expert_size: int  # intermediate size of an expert
    shared_size: int  # of what every token passes besides, 0 where there is none
    layers: tuple[bool, ...]  # [num_layers] whether the layer has experts
    fp32_router: bool  # whether logits are computed in fp32 whatever the model's dtype
    prefix: str  # of a layer's tensors in a checkpoint
    projections: tuple[str, str, str]  # names there of gate, up and down

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return sum(self.layers)

    @classmethod
    def parse(cls, fields: JsonFields, architecture: str, num_layers: int) -> MoeConfig | None:
        """The experts in `config.json`; None for a family, or a model of it, without any.

        Raises:
            ModelLoadError: a missing, wrong or unsupported field; `field` names it.
        """
        match architecture:
            case "MixtralForCausalLM":
                return _mixtral(fields, num_layers)
            case "Qwen3MoeForCausalLM":
                return _qwen3(fields, num_layers)
            case "DeepseekV2ForCausalLM" | "DeepseekV3ForCausalLM":
                return _deepseek(fields, num_layers, is_v3=architecture == "DeepseekV3ForCausalLM")
        return None


def _top_k(fields: JsonFields, num_experts: int, most: int) -> int:
    top_k = fields.integer("num_experts_per_tok")
    if top_k > most:
        of = f"{num_experts} experts" if most == num_experts else f"the {most} experts of a token's groups"
        raise fields.fault("num_experts_per_tok", f"must be at most {of}, found {top_k}")
    return top_k


def _mixtral(fields: JsonFields, num_layers: int) -> MoeConfig:
    num_experts = fields.integer("num_local_experts", default=8)
    return MoeConfig(
        routing=Routing(num_experts, _top_k(fields, num_experts, num_experts), "softmax", is_normalised=True),
        expert_size=fields.integer("intermediate_size"),
        shared_size=0,
        layers=(True,) * num_layers,
        fp32_router=False,
        prefix="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def _qwen3(fields: JsonFields, num_layers: int) -> MoeConfig | None:
    # transformers 5.23 writes Mixtral's name for it, earlier releases and the published checkpoints the other.
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    num_experts = fields.integer(name, minimum=0)
    every = fields.integer("decoder_sparse_step", default=1)
    dense = fields.indices("mlp_only_layers")
    layers = tuple(num_experts > 0 and layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
    if not any(layers):
        return None
    is_normalised = fields.boolean("norm_topk_prob", default=False)
    return MoeConfig(
        routing=Routing(num_experts, _top_k(fields, num_experts, num_experts), "softmax", is_normalised),
        expert_size=fields.integer("moe_intermediate_size"),
        shared_size=0,
        layers=layers,
        fp32_router=False,
        prefix="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
    )


def _deepseek(fields: JsonFields, num_layers: int, *, is_v3: bool) -> MoeConfig | None:
    dense = fields.integer("first_k_dense_replace", default=3 if is_v3 else 0, minimum=0)
    layers = tuple(layer >= dense for layer in range(num_layers))
    if not any(layers):
        return None
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.fault("moe_layer_freq", "other than 1 is not supported")
    expert_size = fields.integer("moe_intermediate_size")
    return MoeConfig(
        routing=_deepseek_v3_routing(fields) if is_v3 else _deepseek_v2_routing(fields),
        expert_size=expert_size,
        shared_size=expert_size * fields.integer("n_shared_experts", default=1 if is_v3 else 2, minimum=0),
        layers=layers,
        fp32_router=True,
        prefix="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
    )


def _deepseek_v2_routing(fields: JsonFields) -> Routing:
    method = fields.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.fault("topk_method", f"{method!r} is not supported; supported: greedy, group_limited_greedy")
    _check_scoring(fields, "softmax")
    if fields.boolean("norm_topk_prob", default=False):
        raise fields.fault("norm_topk_prob", "is not supported for this architecture: no implementation agrees on it")
    num_experts = fields.integer("n_routed_experts")
    groups = _groups(fields, num_experts) if method == "group_limited_greedy" else (1, 1)
    return Routing(
        num_experts,
        _top_k(fields, num_experts, groups[1] * num_experts // groups[0]),
        "softmax",
        is_normalised=False,
        scale=fields.number("routed_scaling_factor", default=1.0),
        num_groups=groups[0],
        top_groups=groups[1],
    )


def _deepseek_v3_routing(fields: JsonFields) -> Routing:
    method = fields.text("topk_method", default="noaux_tc")
    if method != "noaux_tc":
        raise fields.fault("topk_method", f"{method!r} is not supported for this architecture; supported: noaux_tc")
    _check_scoring(fields, "sigmoid")
    num_experts = fields.integer("n_routed_experts")
    num_groups, top_groups = _groups(fields, num_experts)
    if num_experts // num_groups < 2:
        raise fields.fault("n_group", f"must leave 2 of {num_experts} experts to a group, found {num_groups}")
    return Routing(
        num_experts,
        _top_k(fields, num_experts, top_groups * num_experts // num_groups),
        "sigmoid",
        is_normalised=fields.boolean("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=2.5),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=2,
        has_bias=True,
    )


def _check_scoring(fields: JsonFields, expected: Scoring) -> None:
    scoring = fields.text("scoring_func", default=expected)
    if scoring != expected:
        raise fields.fault("scoring_func", f"{scoring!r} is not supported for this architecture; supported: {expected}")


def _groups(fields: JsonFields, num_experts: int) -> tuple[int, int]:
    num_groups, top_groups = fields.integer("n_group"), fields.integer("topk_group")
    if num_experts % num_groups:
        raise fields.fault("n_group", f"must divide {num_experts} experts, found {num_groups}")
    if top_groups > num_groups:
        raise fields.fault("topk_group", f"must be at most {num_groups} groups, found {top_groups}")
    return num_groups, top_groups
