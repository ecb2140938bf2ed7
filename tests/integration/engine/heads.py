"""Checkpoints with a head that guesses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.model.layers.head import HeadParameters, num_listed
from shared.model.random_weights import mean_and_std
from tests.integration.engine.families import EXPERTS, STATES

WITH_HEAD = {"num_nextn_predict_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", WITH_HEAD),
    "deepseek-v3": (EXPERTS["deepseek-v3"][0], {**EXPERTS["deepseek-v3"][1], **WITH_HEAD}),
    "qwen3-next": STATES["qwen3-next"],
    "qwen3.5": STATES["qwen3.5"],
}


def write_knowing(folder: Path, family: str = "llama", vocab_size: int = 320, **options: Any) -> Path:
    """A model whose next token follows from the token before, nearly always, and whose head knows it nearly always. All
    are among the first tokens, which a head guesses."""
    architecture, fields = FAMILIES[family]
    sizes = {"vocab_size": vocab_size, "hidden_size": 64, "extra_config": fields, **options}
    config = write_random_checkpoint(folder, architecture, **sizes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    count = num_listed(vocab_size)
    after = torch.cat([torch.randperm(count, generator=generator) for _ in range(2)])[:vocab_size]
    embedding = torch.randn(vocab_size, 64, generator=generator)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= 0.02
        elif tensor.dim() == 1 and "norm" in name.split(".", 1)[1]:
            tensor.fill_(1.0 if "linear_attn" in name else 1.0 - config.norm_offset)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"].zero_().index_add_(0, after, 0.25 * embedding)
    assert config.head is not None
    projection = f"{config.head.names.prefix}{config.head.names.projection}.weight"
    tensors[projection] = torch.cat((torch.eye(64), 0.02 * torch.randn(64, 64, generator=generator)), dim=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_with_random_head(folder: Path, source: Path) -> Path:
    """A model of a source without one, with a head of random weights."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **WITH_HEAD}))
    described = load_config(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    views = HeadParameters.allocate(described, torch.float32, "meta").checkpoint_views(described)
    for name, view in views.items():
        mean, std = mean_and_std(name, view.shape, described)
        tensors[name] = (torch.randn(tuple(view.shape), generator=generator) * std + mean).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
