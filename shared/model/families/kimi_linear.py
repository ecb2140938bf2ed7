"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): layers with a state in turns with latent attention that encodes no
positions, most with experts."""

from __future__ import annotations

from shared.model.config.delta_config import DeltaConfig
from shared.model.config.json_fields import JsonFields
from shared.model.config.latent_config import LatentConfig
from shared.model.config.layer_config import FULL, LINEAR, LayerConfig, kinds_of
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig
from shared.model.families.decoder_fields import attention_biases, num_layers, read_decoder
from shared.model.families.deepseek import noaux_routing

_SPELLED = {
    "max_position_embeddings": ("model_max_length",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "scoring_func": ("moe_router_activation_func",),
}
_DEFAULTS = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}


def kimi_linear(fields: JsonFields) -> ModelConfig:
    """Kimi Linear 48B."""
    fields = fields.respelled(_SPELLED).with_values(_DEFAULTS)
    if not fields.boolean("mla_use_nope", default=True):
        raise fields.fault("mla_use_nope", "must be true: attention encodes no positions")
    count, numbered = num_layers(fields), fields.child("linear_attn_config") or fields
    by_default = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    if not fields.has("layer_types") and numbered.has("full_attn_layers"):  # counted from 1
        full = numbered.indices("full_attn_layers")
        by_default = [FULL if layer + 1 in full else LINEAR for layer in range(count)]
    kinds = kinds_of(fields, "layer_types", (LINEAR, FULL), by_default)
    if LINEAR not in kinds or len(set(kinds)) == 1:
        raise fields.fault("layer_types", f"must name both {LINEAR} and {FULL}, found {kinds[0]} alone")
    num_dense = fields.integer("first_k_dense_replace", default=1, minimum=0)
    parts = ["dense" if layer < num_dense else "sparse" for layer in range(count)]
    has_experts = [part == "sparse" for part in kinds_of(fields, "mlp_layer_types", ("dense", "sparse"), parts)]
    latent = LatentConfig.parse(fields, None, is_interleaved=False)
    return read_decoder(
        fields,
        "KimiLinearForCausalLM",
        [
            LayerConfig(None, has_experts=experts, has_state=kind == LINEAR)
            for kind, experts in zip(kinds, has_experts, strict=True)
        ],
        head_dim=latent.query_dim,
        num_kv_heads=1,
        **attention_biases(fields),
        moe=_moe(fields) if any(has_experts) else None,
        latent=latent,
        delta=DeltaConfig.parse_by_channel(fields),
        num_unused_layers=fields.integer("num_nextn_predict_layers", default=0, minimum=0),
    )


def _moe(fields: JsonFields) -> MoeConfig:
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.fault("moe_layer_freq", "other than 1 is not supported")
    size = fields.integer("moe_intermediate_size")
    shared = size * fields.integer("n_shared_experts", default=1, minimum=0)
    routing, names = noaux_routing(fields, 2.446), ("w1", "w3", "w2")
    return MoeConfig(routing, size, shared, fp32_router=True, prefix="block_sparse_moe", projections=names)
