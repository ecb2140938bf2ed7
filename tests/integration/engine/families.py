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
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 200.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def write_family(folder: Path, family: str, **settings: object) -> Path:
    """`family`: an architecture of FAMILIES, or a name of EXPERTS."""
    architecture, extra = EXPERTS.get(family, (family, None))
    if architecture.startswith("Deepseek"):
        settings = {"num_kv_heads": 4, "rope": YARN, **settings}
    write_random_checkpoint(
        folder, architecture, **{
            "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4,
            "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "extra_config": extra,
            "seed": FAMILIES.index(architecture) if extra is None else 1, **settings,
        },
    )  # fmt: skip
    return folder
