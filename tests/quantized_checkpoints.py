"""Quantized checkpoints of every storage, and the same weights opened to fp32 for transformers.

Written from the formats' definitions, one number at a time where that is clear, and with none of the product's readers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by the end of their names, and the weight that they stand for, fp32."""
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]
"""Changes tensors and `quantization_config` of a checkpoint."""


@dataclass(frozen=True)
class Storage:
    """One way to store weights."""

    config: dict[str, Any]
    pack: Callable[[Tensor, torch.Generator], Packed]


def changed_copy(folder: Path, to: Path, change: Change) -> Path:
    """A copy of a checkpoint with that change."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors, config["quantization_config"])
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    return to


def write_quantized(source: Path, storage: Storage, quantized: Path, opened: Path, *, head: bool = False) -> None:
    """Writes a plain fp32 checkpoint `source` twice: quantized, and opened again. Routers stay plain, and so does the
    output projection without `head`."""
    generator = torch.Generator().manual_seed(5)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        module = name.removesuffix(".weight")
        is_projection = tensor.dim() == 2 and module.endswith(("_proj", ".w1", ".w2", ".w3", "_mqa"))
        if is_projection or (head and module == "lm_head"):
            parts, plain[name] = storage.pack(tensor, generator)
            own = {f"{module}.{end}": part.contiguous() for end, part in parts.items()}
            packed = {**own, **packed}  # the model's own bias counts
        else:
            packed[name] = plain[name] = tensor
    for folder, content, fields in (
        (quantized, packed, {**config, "quantization_config": storage.config}),
        (opened, plain, config),
    ):
        _write(folder, content, fields, source)


def _write(folder: Path, content: dict[str, Tensor], fields: dict[str, Any], source: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def as_words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [rows, columns] to int32 [rows, words], the first in the lowest bits; the last word is padded."""
    per_word = 32 // bits
    padded = torch.zeros(codes.shape[0], -(-codes.shape[1] // per_word) * per_word, dtype=torch.int64)
    padded[:, : codes.shape[1]] = codes
    words = torch.zeros(padded.shape[0], padded.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= padded[:, place::per_word] << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def rounded(weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(unsigned codes [out, in], scales [out, groups], unsigned zeros [out, groups], opened weight); `groups`: of each
    column."""
    most, count = 2**bits - 1, int(groups.max()) + 1
    scales = torch.zeros(weight.shape[0], count)
    zeros = torch.zeros(weight.shape[0], count, dtype=torch.int64)
    for group in range(count):
        own = weight[:, groups == group]
        if symmetric:
            scales[:, group] = own.abs().amax(1) / (2 ** (bits - 1) - 1)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().long().clamp(0, most)
    scales = scales.half().float()
    codes = ((weight / scales[:, groups]).round().long() + zeros[:, groups]).clamp(0, most)
    return codes, scales, zeros, (codes - zeros[:, groups]).float() * scales[:, groups]


def columns_of(weight: Tensor, group: int) -> Tensor:
    """The group of each column, where adjacent ones form one; 0 = one for all."""
    columns = torch.arange(weight.shape[1])
    return columns // group if group else columns * 0


def shuffled(weight: Tensor, group: int, generator: torch.Generator) -> Tensor:
    """Groups of columns in an order that no two weights have in common."""
    return columns_of(weight, group)[torch.randperm(weight.shape[1], generator=generator)]


def compressed_config(weights: dict[str, Any], name: str = "pack-quantized", **group: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **group}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def pack_quantized(bits: int, *, group: int, symmetric: bool = True, ordered: bool = False) -> Storage:
    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        groups = shuffled(weight, group, generator) if ordered else columns_of(weight, group)
        codes, scales, zeros, opened = rounded(weight, bits, groups, symmetric=symmetric)
        tensors = {
            "weight_packed": as_words(codes, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = as_words(zeros.T, bits).T
        if ordered:
            tensors["weight_g_idx"] = groups.int()
        return tensors, opened

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    order = {"actorder": "group"} if ordered else {}
    return Storage(
        compressed_config({"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy, **order}), pack
    )


def _pack_w8a8(weight: Tensor, _: torch.Generator) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def _pack_fp8(scales_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, torch.Generator], Packed]:
    def pack(weight: Tensor, _: torch.Generator) -> Packed:
        scales = scales_of(weight).bfloat16().float() * 1.01
        scales = scales.bfloat16().float()
        codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales.bfloat16()}, codes.float() * scales

    return pack


def fp8_blocks(rows: int, columns: int) -> Storage:
    def pack(weight: Tensor, _: torch.Generator) -> Packed:
        scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes, opened = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[place].abs().max() / 448
                codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
                opened[place] = codes[place].float() * scales[i, j]
        return {"weight": codes, "weight_scale_inv": scales}, opened

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
    }
    return Storage(config, pack)


def _pack_awq(weight: Tensor, _: torch.Generator) -> Packed:
    codes, scales, zeros, opened = rounded(weight, 4, columns_of(weight, GROUP), symmetric=False)

    def awq_words(values: Tensor) -> Tensor:
        """Output 8 c + order[i] in nibble i of word c."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        ordered = torch.stack([values[:, 8 * (j // 8) + order[j % 8]] for j in range(values.shape[1])], dim=1)
        return as_words(ordered, 4)

    tensors = {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T.half()}
    return tensors, opened


def gptq(bits: int, version: str, *, group: int = GROUP, ordered: bool = False) -> Storage:
    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        groups = shuffled(weight, group, generator) if ordered else columns_of(weight, group)
        codes, scales, zeros, opened = rounded(weight, bits, groups, symmetric=False)
        stored = (zeros - 1) % 2**bits if version == "gptq" else zeros
        tensors = {
            "qweight": as_words(codes, bits).T,
            "qzeros": as_words(stored.T, bits),
            "scales": scales.T.half(),
            "g_idx": groups.int(),
            "bias": torch.zeros(weight.shape[0]),
        }
        return tensors, opened

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": ordered,
        "sym": False,
        "checkpoint_format": version,
    }
    return Storage(config, pack)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution: Dettmers et al. 2023, arXiv:2305.14314, appendix E."""
FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
"""What bitsandbytes' codes of 0 to 7 stand for; from 8 on the same below zero."""


def bits4(kind: str, *, nested: bool, block: int = 64) -> Storage:
    def pack(weight: Tensor, _: torch.Generator) -> Packed:
        table = torch.tensor(NF4 if kind == "nf4" else [*FP4, *(-value for value in FP4)])
        flat = weight.flatten()
        peaks = torch.stack([part.abs().max() for part in flat.split(block)])
        state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {}
        if nested:
            offset, outer = float(peaks.mean()), 256
            large = torch.stack([part.abs().max() for part in (peaks - offset).split(outer)])
            steps = torch.linspace(-1, 1, 256)
            of_peak = large.repeat_interleave(outer)[: len(peaks)]
            places = ((peaks - offset) / of_peak - steps[:, None]).abs().argmin(0)
            peaks = steps[places] * of_peak + offset
            tensors = {"weight.nested_absmax": large, "weight.nested_quant_map": steps}
            state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": offset}
        scales = peaks.repeat_interleave(block)[: len(flat)]
        codes = torch.cat([(part - table[:, None]).abs().argmin(0) for part in (flat / scales).split(1 << 16)])
        tensors |= {
            "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8).view(-1, 1),
            "weight.absmax": places.to(torch.uint8) if nested else peaks,
            "weight.quant_map": table,
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        return tensors, (table[codes] * scales).view(weight.shape)

    return Storage(
        {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": None,
        },
        pack,
    )  # fmt: skip


def write_mxfp4(source: Path, quantized: Path, opened: Path) -> None:
    """Writes a plain fp32 gpt-oss checkpoint twice: with experts in MXFP4, and opened again."""
    config = json.loads((source / "config.json").read_text())
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = plain[name] = tensor
            continue
        groups = tensor.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out_size, groups, 32]
        exponents = (groups.abs().amax(3) / 6).log2().ceil().clamp(-127, 127)
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = (groups[..., None] / 2.0 ** exponents[..., None, None] - numbers).abs().argmin(-1)
        packed[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        packed[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        plain[name] = (numbers[codes] * 2.0 ** exponents[..., None]).flatten(2).transpose(1, 2)
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    _write(quantized, packed, {**config, "quantization_config": quantization}, source)
    _write(opened, plain, config, source)


_ALL_FP4 = torch.tensor([*FP4_E2M1, *(-value for value in FP4_E2M1)])
_ALL_FP8 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
_MX = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_DYNAMIC = {
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
}


def _pack_nvfp4(weight: Tensor, _: torch.Generator) -> Packed:
    """The whole's scale makes the largest group's 448."""
    groups = weight.unflatten(1, (-1, 16))
    peaks = groups.abs().amax(-1)
    whole = 6.0 * 448.0 / peaks.max()
    scales = (peaks / 6.0 * whole).to(torch.float8_e4m3fn)
    own = (scales.float() / whole)[..., None]
    codes = (groups[..., None] / own[..., None] - _ALL_FP4).abs().argmin(-1)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).flatten(1)
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole.view(1)}
    return {**parts, "input_global_scale": torch.ones(1)}, (_ALL_FP4[codes] * own).flatten(1)


def _pack_mx(table: Tensor, codes_of: Callable[[Tensor], dict[str, Tensor]]) -> Callable[..., Packed]:
    """Groups of 32 columns with a power of two each, which makes their largest number one of the table's."""

    def pack(weight: Tensor, _: torch.Generator) -> Packed:
        groups = weight.unflatten(1, (-1, 32))
        exponents = (groups.abs().amax(-1) / table.max()).log2().ceil().clamp(min=-127)
        places = (groups[..., None] / exponents.exp2()[..., None, None] - table).abs().argmin(-1)
        opened = (table[places] * exponents.exp2()[..., None]).flatten(1)
        return {**codes_of(places), "weight_scale": (exponents + 127).to(torch.uint8)}, opened

    return pack


def _mxfp4_codes(places: Tensor) -> dict[str, Tensor]:
    return {"weight_packed": (places[..., 0::2] | places[..., 1::2] << 4).to(torch.uint8).flatten(1)}


STORAGES: dict[str, Storage] = {
    "int4 groups": pack_quantized(4, group=GROUP),
    "int4 groups with zeros": pack_quantized(4, group=GROUP, symmetric=False),
    "int4 ordered": pack_quantized(4, group=GROUP, ordered=True),
    "int4 rows": pack_quantized(4, group=0),
    "int8 rows with zeros": pack_quantized(8, group=0, symmetric=False),
    "int8 groups": pack_quantized(8, group=GROUP),
    "w8a8": Storage(
        compressed_config(
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, "int-quantized", **_DYNAMIC
        ),
        _pack_w8a8,
    ),
    "fp8 tensor": Storage(
        compressed_config({**_FP8, "strategy": "tensor"}, "float-quantized"),
        _pack_fp8(lambda weight: (weight.abs().max() / 448).view(1)),
    ),
    "fp8 rows": Storage(
        compressed_config({**_FP8, "strategy": "channel"}, "float-quantized"),
        _pack_fp8(lambda weight: weight.abs().amax(1, keepdim=True) / 448),
    ),
    "fp8 blocks": fp8_blocks(128, 128),
    "small fp8 blocks": fp8_blocks(32, 32),
    "awq": Storage(
        {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None,
        },
        _pack_awq,
    ),
    "gptq": gptq(4, "gptq"),
    "gptq ordered": gptq(4, "gptq", ordered=True),
    "gptq_v2 int8": gptq(8, "gptq_v2"),
    "gptq rows": gptq(4, "gptq", group=0),
    "nvfp4": Storage(
        compressed_config(
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
            "nvfp4-pack-quantized",
        ),
        _pack_nvfp4,
    ),
    "mxfp4 linear": Storage(
        compressed_config({"num_bits": 4, **_MX}, "mxfp4-pack-quantized"), _pack_mx(_ALL_FP4, _mxfp4_codes)
    ),
    "mxfp8": Storage(
        compressed_config({"num_bits": 8, **_MX}, "mxfp8-quantized"),
        _pack_mx(_ALL_FP8, lambda places: {"weight": places.to(torch.uint8).view(torch.float8_e4m3fn).flatten(1)}),
    ),
    "nf4": bits4("nf4", nested=True),
    "fp4": bits4("fp4", nested=False),
}  # fmt: skip
"""By name."""
OPENED = ("nvfp4", "mxfp4 linear", "nf4", "fp4")
"""Those that are kept in the computation's dtype."""
