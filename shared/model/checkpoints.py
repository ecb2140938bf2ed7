"""Write checkpoints with random weights: every family and shape for tests, real sizes for benchmarks."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.kernels.pool_view import dtype_name
from shared.model.config.model_config import ModelConfig
from shared.model.families.registry import FAMILIES, parse_config
from shared.model.layers.head import HeadParameters
from shared.model.layers.parameters import DecoderParameters
from shared.model.random_weights import mean_and_std
from shared.model.weights.safetensors_files import INDEX_FILE, SINGLE_FILE

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write_random_checkpoint(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    vocab_size: int = 128,
    hidden_size: int = 32,
    intermediate_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    max_position_embeddings: int = 512,
    rope: Mapping[str, object] | None = None,
    tie: bool = False,
    extra_config: Mapping[str, object] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int | None = None,
    tokenizer_from: Path | None = None,
    device: torch.device | str = "cpu",
) -> ModelConfig:
    """Write `config.json` and safetensors files in Hugging Face layout.

    A tensor's values depend on the seed and its name only, so sharding does not change them. Logits come out with a
    standard deviation of about four.

    Args:
        folder: created if missing.
        architecture: one of `FAMILIES`.
        rope: content of `rope_parameters`; default rotary positions if None.
        tie: whether the embedding is also the output projection.
        extra_config: further fields of `config.json`, such as `attention_bias` or `sliding_window`; they override.
        seed: of the random values.
        dtype: of the stored tensors.
        max_shard_bytes: start a new file before this many bytes; one file if None.
        tokenizer_from: folder whose tokenizer files are copied in.
        device: draws the values. A GPU draws billions in seconds, others than the CPU does.

    Returns:
        The configuration, as `load_config` reads it back.

    Raises:
        ModelLoadError: the fields do not describe a supported model.
    """
    fields: dict[str, object] = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type if architecture in FAMILIES else None,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": dict(rope or {"rope_type": "default", "rope_theta": 10_000.0}),
        "tie_word_embeddings": tie,
        "sliding_window": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": None,
        "dtype": dtype_name(dtype),
        **(extra_config or {}),
    }
    config = parse_config(fields)
    if config.latent is not None:
        fields["head_dim"] = config.latent.rope_dim  # what transformers means by it there
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", fields)
    shapes = _shapes(config)
    _write_shards(
        folder,
        shapes,
        dtype,
        max_shard_bytes,
        lambda name: _random_tensor(name, shapes[name], config, seed, device).to(dtype).cpu(),
    )
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, folder / name)
    return config


def _write_shards(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_bytes: int | None,
    tensor_of: Callable[[str], torch.Tensor],
) -> None:
    """Safetensors files of the tensors that `tensor_of` makes, one file at a time, and the index of several."""
    shards = _plan_shards(shapes, dtype.itemsize, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensor_of(name) for name in names}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        total_size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    parameters = DecoderParameters.allocate(config, torch.float32, "meta")
    views = parameters.checkpoint_views(config)
    if config.head is not None:
        views |= HeadParameters.allocate(config, torch.float32, "meta").checkpoint_views(config)
    return {name: tuple(view.shape) for name, view in views.items()}


def _plan_shards(
    shapes: Mapping[str, Sequence[int]], element_bytes: int, max_shard_bytes: int | None
) -> list[list[str]]:
    def fill() -> Iterator[list[str]]:
        shard: list[str] = []
        shard_bytes = 0
        for name, shape in shapes.items():
            num_bytes = math.prod(shape) * element_bytes
            if shard and max_shard_bytes is not None and shard_bytes + num_bytes > max_shard_bytes:
                yield shard
                shard, shard_bytes = [], 0
            shard.append(name)
            shard_bytes += num_bytes
        yield shard

    return list(fill())


def _random_tensor(
    name: str, shape: Sequence[int], config: ModelConfig, seed: int, device: torch.device | str
) -> Tensor:
    key = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little"))
    mean, std = mean_and_std(name, shape, config)
    return torch.randn(tuple(shape), generator=generator, device=device).mul_(std).add_(mean)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
