"""Small checkpoints of every supported family."""

from __future__ import annotations

from pathlib import Path

from shared.model.checkpoints import write_random_checkpoint

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
"""Those whose layers are dense and whose cache has the keys and values of heads."""

LATENT = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "q_lora_rank": None,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
EXPERTS: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "one expert a token": ("MixtralForCausalLM", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 32, "norm_topk_prob": True,
         "mlp_only_layers": [0]},
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {**LATENT, "n_routed_experts": 9, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 3,
         "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "q_lora_rank": 40, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 1,
         "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
    ),
}  # fmt: skip
"""Name → architecture and further fields, of the families with experts; some of them keep latents."""
TURNS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}
OWN_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "default", "rope_theta": 20_000.0},
}
OTHERS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt-oss": (
        "GptOssForCausalLM",
        {**TURNS, "num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True, "rms_norm_eps": 1e-5},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**TURNS, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 6.0}),
    "gemma3": ("Gemma3ForCausalLM", {**TURNS, "query_pre_attn_scalar": 20, "rope_parameters": OWN_ROPES}),
    "glm4": ("Glm4ForCausalLM", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "intermediate_size_mlp": 96,
            "intermediate_size": 32,
            "attention_chunk_size": 11,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "floor_scale": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "ministral": ("MinistralForCausalLM", TURNS),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 200.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "cohere2": ("Cohere2ForCausalLM", {**TURNS, "logit_scale": 0.5, "layer_norm_eps": 1e-5}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {**TURNS, "rope_parameters": OWN_ROPES}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 40,
            },
        },
    ),
}
"""Likewise, of the others."""
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 200.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
}
HYBRID_EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
STATES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3-next": ("Qwen3NextForCausalLM", {**DELTA, **HYBRID_EXPERTS}),
    "qwen3.5": ("Qwen3_5ForCausalLM", {**DELTA, "linear_num_key_heads": 4}),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", {**DELTA, **HYBRID_EXPERTS, "num_experts_per_tok": 1}),
    "kimi-linear": (
        "KimiLinearForCausalLM",
        {
            **LATENT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_experts": 6,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
        },
    ),
}
"""Likewise, of the families with layers that keep a state."""


def write_family(folder: Path, family: str, **settings: object) -> Path:
    """`family`: an architecture of FAMILIES, or a name of EXPERTS, OTHERS or STATES."""
    architecture, extra = {**EXPERTS, **OTHERS, **STATES}.get(family, (family, None))
    if architecture.startswith("Deepseek"):
        settings = {"num_kv_heads": 4, "rope": YARN, **settings}
    if architecture.startswith("Kimi"):  # transformers has a key and a value for each head
        settings = {**settings, "num_kv_heads": settings.get("num_heads", 4)}
    write_random_checkpoint(
        folder, architecture, **{
            "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4,
            "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "extra_config": extra,
            "seed": FAMILIES.index(architecture) if extra is None else 1, **settings,
        },
    )  # fmt: skip
    return folder
