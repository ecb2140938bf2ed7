"""Qwen3-Next, and the text of Qwen 3.5: layers with a state in turns with gated attention, dense or with experts."""

from __future__ import annotations

from typing import Any

from shared.kernels.experts.routing_rules import Routing
from shared.model.config.delta_config import DeltaConfig
from shared.model.config.head_names import QWEN_NAMES
from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import LINEAR, LayerConfig, layer_kinds
from shared.model.config.model_config import HeadConfig, ModelConfig
from shared.model.config.moe_config import MoeConfig, chosen_experts
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import attention_biases, max_positions, num_layers, read_decoder

_SHARE = 0.25
_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "intermediate_size": 5632, "max_position_embeddings": 32_768}


def qwen3_next(fields: JsonFields) -> ModelConfig:
    """Qwen3-Next."""
    dense, every = fields.indices("mlp_only_layers"), fields.integer("decoder_sparse_step", default=1)
    num_experts = fields.integer(_num_experts(fields), default=512, minimum=0)
    has_experts = [
        num_experts > 0 and layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers(fields))
    ]
    moe = _moe(fields, is_normalised=fields.boolean("norm_topk_prob", default=True)) if any(has_experts) else None
    return _hybrid(fields, "Qwen3NextForCausalLM", has_experts, moe, is_by_head=True)


def qwen3_5(fields: JsonFields) -> ModelConfig:
    """Qwen 3.5, dense."""
    return _hybrid(fields, "Qwen3_5ForCausalLM", [False] * num_layers(fields), None, is_by_head=False)


def qwen3_5_moe(fields: JsonFields) -> ModelConfig:
    """Qwen 3.5 with experts."""
    moe = _moe(fields, is_normalised=True)
    return _hybrid(fields, "Qwen3_5MoeForCausalLM", [True] * num_layers(fields), moe, is_by_head=False)


def _num_experts(fields: JsonFields) -> str:
    return "num_local_experts" if fields.has("num_local_experts") else "num_experts"


def _moe(fields: JsonFields, *, is_normalised: bool) -> MoeConfig:
    num_experts = fields.integer(_num_experts(fields))
    routing = Routing(num_experts, chosen_experts(fields, num_experts), "softmax", is_normalised)
    return MoeConfig(
        routing,
        fields.integer("moe_intermediate_size", default=512),
        fields.integer("shared_expert_intermediate_size", default=512),
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )


def _hybrid(
    fields: JsonFields, architecture: str, has_experts: list[bool], moe: MoeConfig | None, *, is_by_head: bool
) -> ModelConfig:
    fields, count = fields.with_values(_DEFAULTS), num_layers(fields)
    kinds = layer_kinds(fields, count, fields.integer("full_attention_interval", default=4), LINEAR)
    if LINEAR not in kinds or len(set(kinds)) == 1:
        raise fields.fault("layer_types", f"must name both {LINEAR} and full_attention, found {kinds[0]} alone")
    rope = RopeConfig.parse(fields, max_positions(fields), share=_SHARE)
    own: dict[str, Any] = {"moe": moe, "delta": DeltaConfig.parse(fields, is_by_head=is_by_head)}
    layers = [
        LayerConfig(None if kind == LINEAR else rope, has_experts=has, has_state=kind == LINEAR)
        for kind, has in zip(kinds, has_experts, strict=True)
    ]
    if fields.integer("mtp_num_hidden_layers", default=1, minimum=0):
        # As the first layer of all in what is dense; checkpoints without one say nothing of it.
        own["head"] = HeadConfig(LayerConfig(rope, has_experts=has_experts[0]), QWEN_NAMES)
    return read_decoder(
        fields, architecture, layers, **attention_biases(fields), qk_norm="head", norm_offset=1.0, is_gated=True, **own
    )
