"""GLM-4, and GLM-4.5 with experts: half of a head is rotated."""

from __future__ import annotations

from shared.model.config.json_fields import JsonFields
from shared.model.config.layer_config import LayerConfig, TensorNames
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig
from shared.model.config.rope_config import RopeConfig
from shared.model.families.decoder_fields import dense_first, max_positions, num_layers, read_decoder
from shared.model.families.deepseek import noaux_routing

_SHARE = 0.5
_GLM4_NAMES = TensorNames(
    attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm", gate_up="gate_up_proj"
)


def glm4(fields: JsonFields) -> ModelConfig:
    """GLM-4 (0414) and later, dense: norms around both parts of a layer."""
    layer = LayerConfig(RopeConfig.parse(fields, max_positions(fields), share=_SHARE))
    has_bias = fields.boolean("attention_bias", default=True)
    layers = [layer] * num_layers(fields)
    return read_decoder(fields, "Glm4ForCausalLM", layers, qkv_bias=has_bias, is_interleaved=True, names=_GLM4_NAMES)


def glm4_moe(fields: JsonFields) -> ModelConfig:
    """GLM-4.5 and later, with experts: the first layers are dense."""
    rope, count = RopeConfig.parse(fields, max_positions(fields), share=_SHARE), num_layers(fields)
    num_dense = fields.integer("first_k_dense_replace", default=1, minimum=0)
    expert_size = fields.integer("moe_intermediate_size")
    shared = expert_size * fields.integer("n_shared_experts", default=1, minimum=0)
    moe = MoeConfig(noaux_routing(fields, 1.0), expert_size, shared, fp32_router=True)
    return read_decoder(
        fields,
        "Glm4MoeForCausalLM",
        dense_first(rope, count, num_dense),
        qkv_bias=fields.boolean("attention_bias", default=False),
        qk_norm="head" if fields.boolean("use_qk_norm", default=False) else "none",
        moe=moe if num_dense < count else None,
        num_unused_layers=fields.integer("num_nextn_predict_layers", default=1, minimum=0),
    )
