"""GGUF files, written from the format's definition with none of the product's readers, and the same weights opened."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gguf_blocks import packed

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OF_EXPERTS = {
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps", "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
AROUND = {**BEHIND, "pre_feedforward_layernorm": "ffn_norm"}
OWN_NAMES = {
    "gemma2": AROUND, "gemma3": AROUND, "olmo2": BEHIND,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
}  # fmt: skip
"""Of architectures, in place of NAMES."""
ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3", "Phi3ForCausalLM": "phi3", "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2", "Glm4ForCausalLM": "glm4", "SmolLM3ForCausalLM": "smollm3",
    "GptOssForCausalLM": "gpt-oss",
}  # fmt: skip
PAIRED = ("llama", "granite", "smollm3")
"""Architectures whose queries' and keys' rows lie in pairs."""
PLUS_ONE = ("gemma2", "gemma3")
"""Those whose norms are stored with 1 added."""
NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
}  # fmt: skip


Stored = tuple[str, tuple[int, ...], bytes]
"""A tensor's type, shape and bytes."""


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """With its type in front."""
    match content:
        case bool():
            return struct.pack("<I?", 7, content)
        case [bool(), *_]:
            return struct.pack("<IIQ", 9, 7, len(content)) + bytes(content)
        case int():
            return struct.pack("<Ii" if content < 0 else "<II", 5 if content < 0 else 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str():
            return struct.pack("<I", 8) + text(content)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(content)) + b"".join(map(text, content))
        case [float(), *_]:
            return struct.pack("<IIQ", 9, 6, len(content)) + struct.pack(f"<{len(content)}f", *content)
        case list():
            return struct.pack("<IIQ", 9, 5, len(content)) + struct.pack(f"<{len(content)}i", *content)
    raise AssertionError(content)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Stored]) -> None:
    """tensors: by name; the last dimension lies side by side."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(name) + value(content) for name, content in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def _full_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Of layers that see all tokens, where those with windows have another."""
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _rotated(config: dict[str, Any]) -> int:
    """Elements of a head that encode positions."""
    share = _full_rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return int(config["head_dim"] * share)


def _of_rope(config: dict[str, Any], arch: str) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Metadata and tensors of scaled positions."""
    rope = _full_rope(config)
    kind, count = rope.get("rope_type", "default"), _rotated(config) // 2
    if kind == "default":
        return {}, {}
    if kind == "longrope":
        trained = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / trained
        tensors: dict[str, Stored] = {
            f"rope_factors_{which}.weight": ("F32", (count,), struct.pack(f"<{count}f", *rope[f"{which}_factor"]))
            for which in ("long", "short")
        }
        return {
            f"{arch}.rope.scaling.original_context_length": trained,
            f"{arch}.rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(trained)),
        }, tensors
    if kind != "llama3":
        found: dict[str, Any] = {
            f"{arch}.rope.scaling.type": kind,
            f"{arch}.rope.scaling.factor": float(rope["factor"]),
        }
        if kind == "yarn":
            found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        return found, {}
    factors, trained = [], rope["original_max_position_embeddings"]
    for pair in range(count):
        length = 2 * math.pi * rope["rope_theta"] ** (pair / count)
        smooth = (trained / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        factor = rope["factor"] if length > trained / rope["low_freq_factor"] else 1.0
        if trained / rope["high_freq_factor"] <= length <= trained / rope["low_freq_factor"]:
            factor = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(factor)
    return {}, {"rope_freqs.weight": ("F32", (count,), struct.pack(f"<{count}f", *factors))}


def _of_experts(config: dict[str, Any], arch: str) -> dict[str, Any]:
    count = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        return {}
    found = {f"{arch}.expert_count": count, f"{arch}.expert_used_count": config["num_experts_per_tok"]}
    size = config.get("moe_intermediate_size")
    if arch == "gpt-oss":
        size = config["intermediate_size"]
    return {**found, f"{arch}.expert_feed_forward_length": size} if size else found


_SCALARS = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"), "gemma3": ("final_logit_softcapping",),
    "granite": ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
}  # fmt: skip
_SCALES = {
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
}  # fmt: skip


def _of_architecture(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """What llama.cpp writes for some architectures alone."""
    found: dict[str, Any] = {
        f"{arch}.{_SCALES.get(name, name)}": float(config[name]) for name in _SCALARS.get(arch, ()) if config.get(name)
    }
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        found[f"{arch}.attention.sliding_window"] = config["sliding_window"] or 0
    if arch == "gemma3" and "layer_types" in config:
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        found |= {f"{arch}.attention.sliding_window_pattern": slides, f"{arch}.rope.freq_base_swa": float(local)}
    return found


def _gguf_name(arch: str, layer: str, rest: str, end: str) -> str:
    parts, names = rest.split(".experts."), {**NAMES, **OWN_NAMES.get(arch, {})}
    own = OF_EXPERTS[parts[1].partition(".")[2]] if len(parts) == 2 else names.get(rest) or OF_EXPERTS[rest]
    return f"blk.{layer}.{own}.{end}"


def _apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's projections, where experts lie in one tensor, inputs first, rows of gate and up in turns."""
    apart: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, _, own = name.rpartition(".")
        module, kind = own.removesuffix("_bias"), "bias" if own.endswith("_bias") else "weight"
        if not prefix.endswith(".experts"):
            apart[f"{name}.weight" if own == "sinks" else name] = tensor
            continue
        for expert, rows in enumerate(tensor if kind == "bias" else tensor.transpose(1, 2)):
            parts = {module: rows} if module == "down_proj" else {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            apart |= {f"{prefix}.{expert}.{part}.{kind}": own.contiguous() for part, own in parts.items()}
    return apart


def _together(weights: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """`_apart` undone."""
    whole = {
        name.replace("sinks.weight", "sinks"): tensor for name, tensor in weights.items() if ".experts." not in name
    }
    for prefix in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        for kind, end in (("weight", ""), ("bias", "_bias")):

            def all_of(part: str, prefix: str = prefix, kind: str = kind) -> Tensor:
                return torch.stack([weights[f"{prefix}.experts.{each}.{part}.{kind}"] for each in range(num_experts)])

            down, gate_up = all_of("down_proj"), torch.stack([all_of("gate_proj"), all_of("up_proj")], 2).flatten(1, 2)
            found = {"down_proj": down, "gate_up_proj": gate_up}
            for name, tensor in found.items():
                whole[f"{prefix}.experts.{name}{end}"] = tensor.transpose(1, 2) if kind == "weight" else tensor
    return whole


def _sorted_as(name: str) -> list[object]:
    """By its parts, and by the numbers in it."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def write_model(
    source: Path,
    kinds: tuple[str, ...],
    path: Path,
    opened: Path,
    more: dict[str, Stored] | None = None,
    **metadata: Any,
) -> None:
    """Writes a plain fp32 checkpoint twice: as a GGUF file, projections in `kinds` in turns and embedding and head in
    the first, and opened again in Hugging Face layout. `more`: further tensors of the file."""
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Stored] = {}
    plain: dict[str, Tensor] = {}
    number = 0
    weights = load_file(source / "model.safetensors")
    weights = _apart(weights) if arch == "gpt-oss" else weights
    for name, tensor in sorted(weights.items(), key=lambda item: _sorted_as(item[0])):
        module, _, end = name.rpartition(".")
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        own = _gguf_name(arch, layer, rest, end) if rest and layer.isdigit() else f"{NAMES[module]}.{end}"
        kind = "F32"
        if tensor.dim() == 2 and not rest.endswith((".gate", ".router")):
            kind = kinds[number % len(kinds)] if rest and ".experts." not in rest else kinds[0]
            number += bool(rest)
        stored = tensor + 1 if arch in PLUS_ONE and name.endswith("norm.weight") else tensor
        raw, found = (stored.numpy().tobytes(), tensor) if kind == "F32" else packed(kind, tensor)
        plain[name] = found
        if arch in PAIRED and (count := heads.get(module.rpartition(".")[2])) and tensor.dim() == 2:
            # Rows of the halves in turns: the blocks of a row stay as they are.
            rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(tensor.shape[0], -1)
            raw = rows.view(count, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape).numpy().tobytes()
        shape = tuple(tensor.shape)
        if ".experts." in rest:  # one behind the other, in the experts' order
            (before, *_), so_far = tensors.get(own, ("", (0,), b""))[1:]
            shape, raw = (before + 1, *shape), so_far + raw
        tensors[own] = (kind, shape, raw)
    of_rope, factors = _of_rope(config, arch)
    tensors |= factors | (more or {})
    of_model = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config.get("rope_theta") or _full_rope(config)["rope_theta"]),
        f"{arch}.rope.dimension_count": _rotated(config),
        "tokenizer.ggml.eos_token_id": 1,
        **of_rope,
        **_of_experts(config, arch),
        **_of_architecture(config, arch),
    }
    write_gguf(path, {**of_model, **metadata}, tensors)
    plain = _together(plain, config["num_local_experts"]) if arch == "gpt-oss" else plain
    opened.mkdir(parents=True)
    (opened / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, opened / "model.safetensors")
