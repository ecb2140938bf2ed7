"""GGUF files, written from the format's definition with none of the product's readers, and the same weights opened."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """With its type in front."""
    match content:
        case bool():
            return struct.pack("<I?", 7, content)
        case int():
            return struct.pack("<Ii" if content < 0 else "<II", 5 if content < 0 else 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str():
            return struct.pack("<I", 8) + text(content)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(content)) + b"".join(map(text, content))
        case list():
            return struct.pack("<IIQ", 9, 5, len(content)) + struct.pack(f"<{len(content)}i", *content)
    raise AssertionError(content)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """tensors: name → (type, shape with the last dimension side by side, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(name) + value(content) for name, content in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def half(number: float) -> tuple[bytes, float]:
    raw = struct.pack("<e", number)
    return raw, struct.unpack("<e", raw)[0]


def packed(kind: str, weight: Tensor) -> tuple[bytes, Tensor]:
    """(blocks of rows, the weight that they stand for)."""
    raw, opened = b"", []
    make = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q6_K": _q6_k}[kind]
    size = 256 if kind.endswith("K") else 32
    for block in weight.reshape(-1, size):
        made, numbers = make(block)
        raw += made
        opened.append(numbers)
    return raw, torch.tensor(opened, dtype=torch.float32).view(weight.shape)


def _q8_0(block: Tensor) -> tuple[bytes, list[float]]:
    raw, scale = half(float(block.abs().max()) / 127)
    codes = (block / scale).round().clamp(-127, 127).int().tolist()
    return raw + struct.pack("<32b", *codes), [scale * code for code in codes]


def _q4_0(block: Tensor) -> tuple[bytes, list[float]]:
    raw, scale = half(float(block.abs().max()) / 7)
    codes = ((block / scale).round() + 8).clamp(0, 15).int().tolist()
    pairs = bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
    return raw + pairs, [scale * (code - 8) for code in codes]


def _bits_of_5(codes: list[int]) -> bytes:
    highest = sum((code >> 4) << i for i, code in enumerate(codes))
    return struct.pack("<I", highest) + bytes(codes[i] & 15 | (codes[i + 16] & 15) << 4 for i in range(16))


def _q5_0(block: Tensor) -> tuple[bytes, list[float]]:
    raw, scale = half(float(block.abs().max()) / 15)
    codes = ((block / scale).round() + 16).clamp(0, 31).int().tolist()
    return raw + _bits_of_5(codes), [scale * (code - 16) for code in codes]


def _q5_1(block: Tensor) -> tuple[bytes, list[float]]:
    (raw, scale), (raw_low, low) = half(float(block.max() - block.min()) / 31), half(float(block.min()))
    codes = ((block - low) / scale).round().clamp(0, 31).int().tolist()
    return raw + raw_low + _bits_of_5(codes), [scale * code + low for code in codes]


def _q4_k(block: Tensor) -> tuple[bytes, list[float]]:
    parts = block.view(8, 32)
    lows = (-parts.amin(1)).clamp(min=0)
    spans = (parts.amax(1) + lows) / 15
    (raw_scale, scale), (raw_low, low) = half(float(spans.max()) / 63), half(float(lows.max()) / 63 + 1e-6)
    sixths = [max(1, min(63, round(float(span) / scale))) for span in spans]
    low_sixths = [min(63, round(float(each) / low)) for each in lows]
    first = bytes(sixths[j] | sixths[j + 4] >> 4 << 6 for j in range(4))
    second = bytes(low_sixths[j] | low_sixths[j + 4] >> 4 << 6 for j in range(4))
    third = bytes(sixths[j + 4] & 15 | (low_sixths[j + 4] & 15) << 4 for j in range(4))
    codes, numbers = [], []
    for part, own, own_low in zip(parts.tolist(), sixths, low_sixths, strict=True):
        found = [min(15, max(0, round((x + low * own_low) / (scale * own)))) for x in part]
        codes.append(found)
        numbers += [scale * own * code - low * own_low for code in found]
    pairs = bytes(codes[2 * c][i] | codes[2 * c + 1][i] << 4 for c in range(4) for i in range(32))
    return raw_scale + raw_low + first + second + third + pairs, numbers


def _q6_k(block: Tensor) -> tuple[bytes, list[float]]:
    parts = block.view(16, 16)
    raw, scale = half(float(block.abs().max()) / 31 / 127)
    own = [max(1, min(127, round(float(part.abs().max()) / 31 / scale))) for part in parts]
    codes = [min(63, max(0, round(x / (scale * own[i // 16])) + 32)) for i, x in enumerate(block.tolist())]
    low, high = bytearray(128), bytearray(64)
    for n in range(2):
        for i in range(32):
            four = [codes[128 * n + 32 * j + i] for j in range(4)]
            low[64 * n + i] = four[0] & 15 | (four[2] & 15) << 4
            low[64 * n + 32 + i] = four[1] & 15 | (four[3] & 15) << 4
            high[32 * n + i] = sum((code >> 4) << (2 * j) for j, code in enumerate(four))
    numbers = [scale * own[i // 16] * (code - 32) for i, code in enumerate(codes)]
    return bytes(low) + bytes(high) + struct.pack("<16b", *own) + raw, numbers


def write_model(source: Path, kinds: tuple[str, ...], path: Path, opened: Path, **metadata: Any) -> None:
    """Writes a plain fp32 checkpoint twice: as a GGUF file, projections in `kinds` in turns and embedding and head in
    the first, and opened again in Hugging Face layout."""
    config = json.loads((source / "config.json").read_text())
    is_llama = config["architectures"] == ["LlamaForCausalLM"]
    arch = (
        "llama" if is_llama else {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2"}[config["architectures"][0]]
    )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    plain: dict[str, Tensor] = {}
    number = 0
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        module, _, end = name.rpartition(".")
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        own = f"blk.{layer}.{NAMES[rest]}.{end}" if rest in NAMES else f"{NAMES[module]}.{end}"
        kind = "F32"
        if tensor.dim() == 2:
            kind = kinds[number % len(kinds)] if rest in NAMES else kinds[0]
            number += rest in NAMES
        raw, found = (tensor.numpy().tobytes(), tensor) if kind == "F32" else packed(kind, tensor)
        plain[name] = found
        if is_llama and (count := heads.get(module.rpartition(".")[2])) and tensor.dim() == 2:
            # Rows of the halves in turns: the blocks of a row stay as they are.
            rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(tensor.shape[0], -1)
            raw = rows.view(count, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape).numpy().tobytes()
        tensors[own] = (kind, tuple(tensor.shape), raw)
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
        f"{arch}.rope.freq_base": float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]),
        f"{arch}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    write_gguf(path, {**of_model, **metadata}, tensors)
    opened.mkdir(parents=True)
    (opened / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, opened / "model.safetensors")
