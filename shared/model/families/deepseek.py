"""DeepSeek V2 and V3: latent attention, experts in groups."""

from __future__ import annotations

from shared.kernels.experts.routing_rules import Routing, Scoring
from shared.model.config.json_fields import JsonFields
from shared.model.config.latent_config import LatentConfig
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig, chosen_experts
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import attention_biases, dense_first, max_positions, num_layers, read_decoder


def deepseek_v2(fields: JsonFields) -> ModelConfig:
    """DeepSeek V2 and V2 Lite."""
    return _deepseek(fields, is_v3=False)


def deepseek_v3(fields: JsonFields) -> ModelConfig:
    """DeepSeek V3 and R1."""
    return _deepseek(fields, is_v3=True)


def _deepseek(fields: JsonFields, *, is_v3: bool) -> ModelConfig:
    rope = RopeConfig.parse(fields, max_positions(fields))
    is_interleaved = not is_v3 or fields.boolean("rope_interleave", default=True)
    latent = LatentConfig.parse(fields, rope, is_interleaved=is_interleaved)
    num_dense = fields.integer("first_k_dense_replace", default=3 if is_v3 else 0, minimum=0)
    count = num_layers(fields)
    moe = _experts(fields, is_v3=is_v3) if num_dense < count else None
    return read_decoder(
        fields,
        f"DeepseekV{3 if is_v3 else 2}ForCausalLM",
        dense_first(rope, count, num_dense),
        head_dim=latent.query_dim,
        num_kv_heads=1,
        **attention_biases(fields),
        mlp_bias=not is_v3 and fields.boolean("mlp_bias", default=False),
        moe=moe,
        latent=latent,
        num_unused_layers=fields.integer("num_nextn_predict_layers", default=1, minimum=0) if is_v3 else 0,
    )


def _experts(fields: JsonFields, *, is_v3: bool) -> MoeConfig:
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.fault("moe_layer_freq", "other than 1 is not supported")
    expert_size = fields.integer("moe_intermediate_size")
    return MoeConfig(
        routing=noaux_routing(fields, 2.5) if is_v3 else _deepseek_v2_routing(fields),
        expert_size=expert_size,
        shared_size=expert_size * fields.integer("n_shared_experts", default=1 if is_v3 else 2, minimum=0),
        fp32_router=True,
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
        chosen_experts(fields, num_experts, groups[1] * num_experts // groups[0]),
        "softmax",
        is_normalised=False,
        scale=fields.number("routed_scaling_factor", default=1.0),
        num_groups=groups[0],
        top_groups=groups[1],
    )


def noaux_routing(fields: JsonFields, scale: float) -> Routing:
    """Sigmoids with a bias that balances experts (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2)."""
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
        chosen_experts(fields, num_experts, top_groups * num_experts // num_groups),
        "sigmoid",
        is_normalised=fields.boolean("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=scale),
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
