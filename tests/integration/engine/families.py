"""Small checkpoints of every supported family."""

from __future__ import annotations

from pathlib import Path

from shared.model.checkpoints import write_random_checkpoint

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


def write_family(folder: Path, architecture: str, **settings: object) -> Path:
    write_random_checkpoint(
        folder, architecture, vocab_size=211, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, max_position_embeddings=512, seed=FAMILIES.index(architecture), **settings,
    )  # fmt: skip
    return folder
