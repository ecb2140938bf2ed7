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
}
"""125m: a small GQA Llama; 1b: TinyLlama's shape."""


_ANY_TOKENIZER = (
    Path(__file__).parents[2] / "models" / "demo"
)  # prompts are token ids, but some engines require a tokenizer


def checkpoint(name: str) -> Path:
    """The folder of a shape's bf16 checkpoint, written to the user's cache unless it exists."""
    folder = Path.home() / ".cache" / "tandem" / "checkpoints" / name
    if not (folder / TOKENIZER_FILES[0]).exists():
        write_random_checkpoint(
            folder,
            "LlamaForCausalLM",
            max_position_embeddings=16384,
            dtype=torch.bfloat16,
            tie=False,
            tokenizer_from=_ANY_TOKENIZER,
            **SHAPES[name],
        )
    return folder
