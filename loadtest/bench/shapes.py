"""Checkpoints of real shapes with random weights, for measurements of speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shared.model.checkpoints import TOKENIZER_FILES, write_random_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "125m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_layers": 12,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 64,
    },
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_layers": 22,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 64,
    },
    "qwen3-moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_layers": 3,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 128,
        "extra_config": {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    },
    "deepseek-v2-lite": {
        "architecture": "DeepseekV2ForCausalLM",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_layers": 3,
        "num_heads": 16,
        "num_kv_heads": 16,
        "extra_config": {
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    },
}
"""125m: a small GQA Llama; 1b: TinyLlama's shape; qwen3-moe and deepseek-v2-lite: three layers of Qwen3-30B-A3B and of
DeepSeek-V2-Lite, experts and heads of full size and number. All with a vocabulary of 32,000."""


_MOST_BYTES = 1 << 30  # of a file: what is generated at once

_ANY_TOKENIZER = (
    Path(__file__).parents[2] / "models" / "demo"
)  # prompts are token ids, but some engines require a tokenizer


def checkpoint(name: str) -> Path:
    """The folder of a shape's bf16 checkpoint, written to the user's cache unless it exists."""
    folder = Path.home() / ".cache" / "tandem" / "checkpoints" / name
    if not (folder / TOKENIZER_FILES[0]).exists():
        write_random_checkpoint(
            folder,
            max_position_embeddings=16384,
            dtype=torch.bfloat16,
            tie=False,
            tokenizer_from=_ANY_TOKENIZER,
            max_shard_bytes=_MOST_BYTES if "extra_config" in SHAPES[name] else None,
            **SHAPES[name],
        )
    return folder
