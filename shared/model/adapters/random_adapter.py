"""Writes adapters of random numbers as PEFT saves them: for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.model.adapters.adapter import LORA_A, LORA_B, PREFIX, WEIGHTS_FILE
from shared.model.adapters.target_modules import adapter_targets
from shared.model.config.folder import ADAPTER_FILE
from shared.model.config.model_config import ModelConfig


def write_random_adapter(
    folder: Path,
    config: ModelConfig,
    rank: int = 16,
    seed: int = 0,
    targets: Collection[str] | None = None,
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
    **fields: object,
) -> Path:
    """An adapter of a model, into a folder that is made where it is missing.

    Args:
        folder: where it goes.
        config: the model's.
        rank: of every module but those of the field `rank_pattern`.
        seed: of the numbers.
        targets: last parts of modules' names; None: all that there are.
        dtype: of the tensors.
        strength: standard deviation of what it adds to an output, for inputs of a standard deviation of 1.
        fields: of the configuration, in place of its own.

    Returns:
        `folder`.
    """
    modules = adapter_targets(config)
    names = sorted({name.rpartition(".")[2] for name in modules}) if targets is None else sorted(targets)
    pattern = fields.get("rank_pattern", {})
    assert isinstance(pattern, Mapping)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, target in modules.items():
        leaf = module.rpartition(".")[2]
        if leaf not in names:
            continue
        own = pattern.get(leaf, rank)
        a = torch.randn(own, target.in_size, generator=generator) * target.in_size**-0.5
        b = torch.randn(target.num_outputs, own, generator=generator) * own**-0.5
        b *= strength / 2  # scale is alpha / r = 2
        tensors[PREFIX + module + LORA_A] = a.to(dtype)
        tensors[PREFIX + module + LORA_B] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": names,
        "bias": "none",
        **fields,
    }
    (folder / ADAPTER_FILE).write_text(json.dumps(written))
    return folder
