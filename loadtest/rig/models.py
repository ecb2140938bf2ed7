"""Checkpoints with random weights, for measurements of speed, which does not depend on the weights' values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, ModelLoadError
from shared.model.families.registry import load_config

Shape = Mapping[str, Any]
"""Arguments of `write_random_checkpoint`."""

SHAPES: dict[str, Shape] = {
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
    "4b": {
        "vocab_size": 32000,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
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
    "qwen3-next-small": {
        "architecture": "Qwen3NextForCausalLM",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_layers": 8,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "extra_config": {
            "full_attention_interval": 4,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "partial_rotary_factor": 0.25,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    },
    "gpt-oss-small": {
        "architecture": "GptOssForCausalLM",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_layers": 8,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 64,
        "extra_config": {
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "sliding_window": 128,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
        },
        "rope": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "gemma3-1b": {
        "architecture": "Gemma3ForCausalLM",
        "vocab_size": 32000,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_layers": 26,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "extra_config": {
            "layer_types": [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(26)],
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    },
}
"""125m: a small GQA Llama; 1b: TinyLlama's shape; 4b: Qwen3-4B's; qwen3-moe and deepseek-v2-lite: three layers of
Qwen3-30B-A3B and of DeepSeek-V2-Lite, experts and heads of full size and number; qwen3-next-small: eight narrower
layers of Qwen3-Next, two of which attend, with states of full size a head; gpt-oss-small: eight narrower layers of
gpt-oss; gemma3-1b: Gemma 3 1B's shape. All with a vocabulary of 32,000."""

SERVED: dict[str, Shape] = {
    "xs": {"hidden_size": 384, "intermediate_size": 1024, "num_layers": 8, "num_heads": 6, "num_kv_heads": 3},
    "s": {"hidden_size": 512, "intermediate_size": 1376, "num_layers": 12, "num_heads": 8, "num_kv_heads": 4},
    "b": {"hidden_size": 768, "intermediate_size": 2048, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4},
}
"""Llamas with heads of 64 whose compute dominates the Python around it. `b` has 78 million parameters; `s` has 36
million, for machines without fast 16-bit arithmetic; `xs` has 14 million, for machines without a whole free core."""

_OF_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
ON_GPU: dict[str, Shape] = {
    "8b": {**_OF_8B, "num_layers": 32},
    "8b-half": {**_OF_8B, "num_layers": 16},
    "3b": {**_OF_8B, "hidden_size": 3072, "intermediate_size": 8192, "num_heads": 24, "num_layers": 28},
}
"""Llama-3-8B, half of its layers, and Llama-3.2-3B, all with another model's vocabulary."""

DEMO = Path(__file__).parents[2] / "models" / "demo"

_MOST_BYTES = 1 << 30  # of a file: what is generated at once


def checkpoint(name: str) -> Path:
    """The folder of a bf16 checkpoint of SHAPES, written to the user's cache unless it exists."""
    folder = Path.home() / ".cache" / "tandem" / "checkpoints" / name
    # Prompts are token ids, but some engines require a tokenizer: any will do.
    _write(folder, SHAPES[name], DEMO, max_position_embeddings=16384, tie=False)
    return folder


def model_folder(name: str) -> Path:
    """The folder of a model of SHAPES, see `checkpoint`, or the folder of that name."""
    return checkpoint(name) if name in SHAPES else Path(name)


def write_model(folder: Path, shape: Shape, tokenizer_of: Path, *, max_len: int = 8192, device: str = "cpu") -> Path:
    """Makes the folder of a model that can be served, unless it exists, and returns it. Its vocabulary is that of the
    model `tokenizer_of`. `max_len`: its longest sequence, tokens; `device`: as for `write_random_checkpoint`. Raises
    ConfigError (`tokenizer`) if `tokenizer_of` is none."""

    try:
        vocab_size = load_config(tokenizer_of).vocab_size
    except ModelLoadError as error:
        raise ConfigError(f"{tokenizer_of} is not a model folder: {error.message}", field="tokenizer") from error
    _write(
        folder,
        {"head_dim": 64, **shape, "vocab_size": vocab_size},
        tokenizer_of,
        max_position_embeddings=max_len,
        tie=True,
        device=device,
    )
    return folder


def _write(folder: Path, shape: Shape, tokenizer_of: Path, **fields: Any) -> None:
    import torch  # imported here: the load generator's commands use this module and start faster without torch

    from shared.model.checkpoints import TOKENIZER_FILES, write_random_checkpoint

    if (folder / TOKENIZER_FILES[0]).exists():  # written last
        return
    write_random_checkpoint(
        folder,
        dtype=torch.bfloat16,
        tokenizer_from=tokenizer_of,
        max_shard_bytes=_MOST_BYTES,
        **{**shape, **fields},
    )
