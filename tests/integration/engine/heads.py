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


def write_eagle(folder: Path, model: Path, num_guessable: int = 0, layer: str = "midlayer.", **fields: Any) -> Path:
    """An EAGLE-3 head of random weights for a model; `fields`: of its `config.json`. It guesses `num_guessable` tokens,
    not the first ones; 0: all."""
    of_model, generator = load_config(model), torch.Generator().manual_seed(7)
    hidden, inner, count = of_model.hidden_size, 2 * of_model.hidden_size, num_guessable or of_model.vocab_size
    heads, kv = (number * of_model.head_dim for number in (2 * of_model.num_kv_heads, of_model.num_kv_heads))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 2 * of_model.num_kv_heads,
        "num_key_value_heads": of_model.num_kv_heads,
        "head_dim": of_model.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "vocab_size": of_model.vocab_size,
        "draft_vocab_size": count,
        "eagle_aux_hidden_state_layer_ids": [1, of_model.num_layers // 2, of_model.num_layers - 1],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    shapes = {
        "fc": (hidden, 3 * hidden),
        f"{layer}self_attn.q_proj": (heads, 2 * hidden),
        f"{layer}self_attn.k_proj": (kv, 2 * hidden),
        f"{layer}self_attn.v_proj": (kv, 2 * hidden),
        f"{layer}self_attn.o_proj": (hidden, heads),
        f"{layer}mlp.gate_proj": (inner, hidden),
        f"{layer}mlp.up_proj": (inner, hidden),
        f"{layer}mlp.down_proj": (hidden, inner),
        "lm_head": (count, hidden),
    }
    tensors = {f"{n}.weight": torch.randn(s, generator=generator) * 2 / s[1] ** 0.5 for n, s in shapes.items()}
    for name in ("norm", *(f"{layer}{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    tokens = torch.randperm(of_model.vocab_size, generator=generator)[:count].sort().values
    tensors["d2t"] = tokens - torch.arange(count)
    tensors["t2d"] = torch.zeros(of_model.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_knowing_eagle(folder: Path, model: Path) -> Path:
    """An EAGLE-3 head that nearly always knows the token after the next one of a model of `write_knowing`, by the first
    of its states alone; what it guesses from guesses makes no sense."""
    write_eagle(folder, model)
    tensors, of_model = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    embedding, output = of_model["model.embed_tokens.weight"], of_model["lm_head.weight"]
    following = (embedding @ output.T).argmax(-1)
    tensors["fc.weight"] = torch.cat((torch.eye(64), torch.zeros(64, 128)), 1)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.02
    tensors["lm_head.weight"].zero_().index_add_(0, following[following], 0.25 * embedding)
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
