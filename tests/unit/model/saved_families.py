"""Small models of every family, as the locked transformers makes and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "head_dim": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
STATES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
}
LLAMA4 = {"intermediate_size_mlp": 24, "attention_chunk_size": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": TURNS}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "deepseek-v2": ("deepseek_v2", LATENT),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 20, "n_group": 2, "topk_group": 1}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "ministral": ("ministral", {"sliding_window": 1, "layer_types": TURNS}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 16,
                "factor": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 3, "layer_types": TURNS}),
    "phi3": ("phi3", {"num_key_value_heads": 3}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 5.0],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "glm4": ("glm4", {}),
    "glm4-moe": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 24,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 2,
        },
    ),
    "gemma2": ("gemma2", {"sliding_window": 3, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "layer_types": TURNS, "query_pre_attn_scalar": 20}),
    "smollm3": ("smollm3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 3}),
    "llama4": (
        "llama4_text",
        {
            **LLAMA4,
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 1],
            "floor_scale": 6,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4-one-expert": ("llama4_text", {**LLAMA4, "num_local_experts": 1, "attention_chunk_size": 1}),
    "llama4-dense": ("llama4_text", {**LLAMA4, "moe_layers": [], "use_qk_norm": False, "attention_chunk_size": 33}),
    "cohere2": ("cohere2", {"sliding_window": 3, "layer_types": TURNS, "logit_scale": 0.5, "attention_bias": True}),
    "gpt-oss": (
        "gpt_oss",
        {"sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            **STATES,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "partial_rotary_factor": 0.5,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3.5": ("qwen3_5_text", {**STATES, "linear_num_key_heads": 3, "partial_rotary_factor": 0.5}),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {
            **STATES,
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "linear_conv_kernel_dim": 2,
            "partial_rotary_factor": 0.5,
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **LATENT,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "num_hidden_layers": 4,
            "linear_num_heads": 3,
            "linear_head_dim": 5,
            "num_experts": 4,
            "n_group": 2,
        },
    ),
    "gpt-oss-one-expert": (
        "gpt_oss",
        {"sliding_window": 1, "num_local_experts": 1, "num_experts_per_tok": 1, "layer_types": TURNS[::-1]},
    ),
}
"""Name → model type and fields beside SIZES."""
IMAGES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cohere2_vision": ("cohere2", {"model_type": "siglip_vision_model"}, {"alignment_intermediate_size": 32}),
    "gemma3": ("gemma3", {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}),
    "llama4": (
        "llama4",
        {
            "model_type": "llama4_vision_model",
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        {},
    ),
    "llava": ("llama", {"model_type": "clip_vision_model", "projection_dim": 16}, {}),
    "qwen3_5": ("qwen3.5", {"out_hidden_size": 48, "num_position_embeddings": 16}, {}),
    "qwen3_5_moe": ("qwen3.5-moe", {"out_hidden_size": 48, "num_position_embeddings": 16}, {}),
    "mistral3": ("ministral3", {"model_type": "pixtral", "head_dim": 8}, {}),
}
"""Model type → the family of its text, fields of what reads images, and of the whole."""


def save(folder: Path, name: str, max_shard_size: str = "1GB", **more: Any) -> PreTrainedModel:
    """Saves a family's model with random weights and returns it."""
    model_type, own = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **own, **more})
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    _fill(model)
    model.eval().save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def save_with_images(folder: Path, name: str) -> PreTrainedModel:
    """Saves one of WITH_IMAGES with random weights and returns it."""
    text, vision, own = WITH_IMAGES[name]
    model_type, fields = FAMILIES[text]
    # Beside images, transformers 5.23 leaves out the scale of Cohere's logits.
    text_config = {**SIZES, **fields, "model_type": model_type, **({"logit_scale": 1.0} if text == "cohere2" else {})}
    config = AutoConfig.for_model(name, text_config=text_config, vision_config={**IMAGES, **vision}, **own)
    torch.manual_seed(len(name))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    _fill(model)
    model.eval().save_pretrained(folder)
    return model


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    for key, weight in model.named_parameters():
        spread = 2.0 * weight.shape[-1] ** -0.5
        if weight.dim() < 2:
            spread = 0.3
        elif "embed" in key and not model.config.tie_word_embeddings:
            spread = 1.0
        weight.normal_(1.0 if "norm" in key else 0.0, spread)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1)
