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

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OF_EXPERTS = {
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps", "w1": "ffn_gate_exps", "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}  # fmt: skip
ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
}  # fmt: skip
NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23,
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


def half(number: float) -> tuple[bytes, float]:
    raw = struct.pack("<e", number)
    return raw, struct.unpack("<e", raw)[0]


def packed(kind: str, weight: Tensor) -> tuple[bytes, Tensor]:
    """(blocks of rows, the weight that they stand for)."""
    raw, opened = b"", []
    make = {
        "Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q6_K": _q6_k, "Q2_K": _q2_k,
        "Q3_K": _q3_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    }[kind]  # fmt: skip
    size = 256 if kind.endswith(("K", "XS")) else 32
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


def _in_order_of_2(codes: list[int]) -> bytes:
    """The lowest two bits of 256 codes, those of four runs of 32 a byte."""
    runs = [codes[32 * run : 32 * run + 32] for run in range(8)]
    return bytes(
        sum((runs[4 * n + j][i] & 3) << 2 * j for j in range(4)) for n in range(2) for i in range(32)
    )  # fmt: skip


def _q2_k(block: Tensor) -> tuple[bytes, list[float]]:
    parts = block.view(16, 16)
    lows = (-parts.amin(1)).clamp(min=0)
    spans = (parts.amax(1) + lows) / 3
    (raw_scale, scale), (raw_low, low) = half(float(spans.max()) / 15), half(float(lows.max()) / 15 + 1e-6)
    own = [max(1, min(15, round(float(span) / scale))) for span in spans]
    own_lows = [min(15, round(float(each) / low)) for each in lows]
    codes, numbers = [], []
    for part, step, down in zip(parts.tolist(), own, own_lows, strict=True):
        found = [min(3, max(0, round((x + low * down) / (scale * step)))) for x in part]
        codes += found
        numbers += [scale * step * code - low * down for code in found]
    head = bytes(step | down << 4 for step, down in zip(own, own_lows, strict=True))
    return head + _in_order_of_2(codes) + raw_scale + raw_low, numbers


def _q3_k(block: Tensor) -> tuple[bytes, list[float]]:
    parts = block.view(16, 16)
    raw, scale = half(-float(block.abs().max()) / 4 / 32)
    own = [max(-32, min(31, round(-float(part.abs().max()) / 4 / -scale))) for part in parts]  # all below 0
    codes, numbers = [], []
    for part, step in zip(parts.tolist(), own, strict=True):
        found = [min(7, max(0, round(x / (scale * step)) + 4)) if step else 4 for x in part]
        codes += found
        numbers += [scale * step * (code - 4) for code in found]
    steps = [step + 32 for step in own]
    packed = bytes(steps[i] & 15 | (steps[i + 8] & 15) << 4 for i in range(8))
    packed += bytes(sum((steps[i + 4 * j] >> 4) << 2 * j for j in range(4)) for i in range(4))
    highest = bytes(sum((codes[32 * run + i] >> 2) << run for run in range(8)) for i in range(32))
    return highest + _in_order_of_2(codes) + packed + raw, numbers


UNEVEN = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def _uneven(x: float) -> int:
    return min(range(16), key=lambda code: abs(UNEVEN[code] - x))


def _iq4_nl(block: Tensor) -> tuple[bytes, list[float]]:
    raw, scale = half(float(block.abs().max()) / 113)
    codes = [_uneven(x / scale) for x in block.tolist()]
    pairs = bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
    return raw + pairs, [scale * UNEVEN[code] for code in codes]


def _iq4_xs(block: Tensor) -> tuple[bytes, list[float]]:
    parts = block.view(8, 32)
    raw, scale = half(float(block.abs().max()) / 113 / 31)
    own = [max(1, min(31, round(float(part.abs().max()) / 113 / scale))) for part in parts]
    pairs, numbers = b"", []
    for part, step in zip(parts.tolist(), own, strict=True):
        codes = [_uneven(x / (scale * step)) for x in part]
        pairs += bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
        numbers += [scale * step * UNEVEN[code] for code in codes]
    steps = [step + 32 for step in own]
    upper = struct.pack("<H", sum((step >> 4) << 2 * part for part, step in enumerate(steps)))
    lower = bytes(steps[2 * i] & 15 | (steps[2 * i + 1] & 15) << 4 for i in range(4))
    return raw + upper + lower + pairs, numbers


def _of_rope(config: dict[str, Any], arch: str) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Metadata and tensors of scaled positions."""
    rope = config.get("rope_parameters") or {}
    kind, count = rope.get("rope_type", "default"), config["head_dim"] // 2
    if kind == "default":
        return {}, {}
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
    return {**found, f"{arch}.expert_feed_forward_length": size} if size else found


def _gguf_name(layer: str, rest: str, end: str) -> str:
    parts = rest.split(".experts.")
    own = OF_EXPERTS[parts[1].partition(".")[2]] if len(parts) == 2 else NAMES.get(rest) or OF_EXPERTS[rest]
    return f"blk.{layer}.{own}.{end}"


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
    is_llama = arch == "llama"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Stored] = {}
    plain: dict[str, Tensor] = {}
    number = 0
    for name, tensor in sorted(load_file(source / "model.safetensors").items(), key=lambda item: _sorted_as(item[0])):
        module, _, end = name.rpartition(".")
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        own = _gguf_name(layer, rest, end) if rest and layer.isdigit() else f"{NAMES[module]}.{end}"
        kind = "F32"
        if tensor.dim() == 2 and not rest.endswith(".gate"):
            kind = kinds[number % len(kinds)] if rest and ".experts." not in rest else kinds[0]
            number += bool(rest)
        raw, found = (tensor.numpy().tobytes(), tensor) if kind == "F32" else packed(kind, tensor)
        plain[name] = found
        if is_llama and (count := heads.get(module.rpartition(".")[2])) and tensor.dim() == 2:
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
        f"{arch}.rope.freq_base": float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]),
        f"{arch}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.eos_token_id": 1,
        **of_rope,
        **_of_experts(config, arch),
    }
    write_gguf(path, {**of_model, **metadata}, tensors)
    opened.mkdir(parents=True)
    (opened / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, opened / "model.safetensors")
