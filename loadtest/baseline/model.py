"""A model to measure with: random weights in a shape whose compute dominates the Python around it.

Speed does not depend on the weights' values. The tokenizer is that of an existing model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_position: int = 8192

    @property
    def head_dim(self) -> int:
        """Dimension of a head's queries, keys and values."""
        return self.hidden_size // self.num_heads


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("xs", hidden_size=384, intermediate_size=1024, num_layers=8, num_heads=6, num_kv_heads=3),
        Shape("s", hidden_size=512, intermediate_size=1376, num_layers=12, num_heads=8, num_kv_heads=4),
        Shape("b", hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12, num_kv_heads=4),
    )
}
"""`b` has 78 million parameters; `s` has 36 million, for machines without fast 16-bit arithmetic; `xs` has 14 million,
for machines without a whole free core."""


def write_model(folder: Path, shape: Shape, tokenizer_of: Path) -> None:
    """Makes the model's folder unless it exists; raises ConfigError (`tokenizer`) if the tokenizer cannot be read."""
    if (folder / "config.json").exists():
        return
    try:
        config = json.loads((tokenizer_of / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tokenizer_of} is not a model folder: {error}", field="tokenizer") from error
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, folder / name)
    _write_weights(folder, shape, config["vocab_size"])
    config |= {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": True,
    }
    # Last: an incomplete folder does not have it, and is made again.
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(folder: Path, shape: Shape, vocab_size: int) -> None:
    # Imported here: only this command of the load tests needs torch.
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in _parameters(shape, vocab_size):
        if len(size) == 1:
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.randn(size, generator=generator).mul_(0.02).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _parameters(shape: Shape, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes as in Hugging Face's Llama, [out, in] for matrices."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (vocab_size, hidden)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
