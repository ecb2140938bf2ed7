"""Write the network as a Hugging Face checkpoint."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.recipe.network import Llama

MAX_BYTES = 8_000_000


def write_config(model: Llama, folder: Path, bos: int, eos: int) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    shape = model.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": 256}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def as_shipped(model: Llama) -> Llama:
    """A float32 copy with parameters rounded as in the written file; RoPE tables stay exact."""
    shipped = copy.deepcopy(model)
    with torch.no_grad():
        for weight in shipped.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    return shipped


def write_weights(model: Llama, folder: Path) -> int:
    """Write ``model.safetensors`` in bfloat16, in one rename, and return its size in bytes."""
    target = folder / "model.safetensors"
    unfinished = folder / ".model.safetensors.new"
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(tensors, unfinished, metadata={"format": "pt"})
    size = unfinished.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"model.safetensors would be {size} bytes, more than {MAX_BYTES}")
    unfinished.chmod(0o644)  # safetensors writes owner-only files
    unfinished.rename(target)
    return size
