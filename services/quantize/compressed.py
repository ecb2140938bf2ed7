"""How compressed-tensors stores weights: the tensors of a projection, and what `config.json` says of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.linear_spec import Kind, LinearSpec
from shared.kernels.quantized import INT4_MIDDLE, Piece, pack_nibbles

Scheme = Literal["int8", "int4", "fp8", "w8a8", "w4a8"]
KINDS: Mapping[Scheme, Kind] = {"int8": "int8", "int4": "int4", "fp8": "fp8", "w8a8": "int8", "w4a8": "int4"}
"""Scheme → the kind of its codes."""
_FORMATS: Mapping[Scheme, str] = {
    "int8": "pack-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
    "w8a8": "int-quantized",
    "w4a8": "int-quantized",
}
_ROUNDS_INPUT: tuple[Scheme, ...] = ("w8a8", "w4a8")
_PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Activations of w8a8 and w4a8: rounded as they come, a scale a token."""
_CODES_PER_WORD = {"int4": 8, "int8": 4}
_ALL = "Linear"


@dataclass(frozen=True)
class Stored:
    """One tensor as a safetensors file has it."""

    dtype: str  # as in the header
    shape: tuple[int, ...]


def stored_tensors(scheme: Scheme, spec: LinearSpec, shape: Sequence[int], scale_dtype: str) -> dict[str, Stored]:
    """The tensors of a projection [out_size, in_size] by the ends of their names; codes, scales, and of packed
    ones the shape, in this order."""
    out_size, in_size = shape
    scales = {"weight_scale": Stored(scale_dtype, (out_size, spec.num_groups(in_size)))}
    if scheme == "fp8":
        return {"weight": Stored("F8_E4M3", (out_size, in_size)), **scales}
    if scheme in _ROUNDS_INPUT:  # a byte a code, also with 4 bits
        return {"weight": Stored("I8", (out_size, in_size)), **scales}
    per_word = _CODES_PER_WORD[spec.kind]
    found = {"weight_packed": Stored("I32", (out_size, -(-in_size // per_word))), **scales}
    return {**found, "weight_shape": Stored("I64", (2,))}


def codes_of(scheme: Scheme, piece: Piece) -> Tensor:
    """Some rows of the first of `stored_tensors`."""
    if scheme == "w4a8":
        return (piece.codes.to(torch.int16) - INT4_MIDDLE).to(torch.int8)
    if scheme in ("fp8", "w8a8"):
        return piece.codes
    unsigned = piece.codes if piece.kind == "int4" else (piece.codes.to(torch.int16) + 128).to(torch.uint8)
    return _words(unsigned, piece.kind)


def _words(codes: Tensor, kind: Kind) -> Tensor:
    """uint8 [rows, codes] to int32 [rows, words], the first code in the lowest bits; zeros fill the last word."""
    padded = functional.pad(codes, (0, -codes.shape[1] % _CODES_PER_WORD[kind]))
    return (pack_nibbles(padded) if kind == "int4" else padded).contiguous().view(torch.int32)


def quantization_config(scheme: Scheme, specs: Mapping[str, LinearSpec], ignored: Sequence[str]) -> dict[str, Any]:
    """The field of `config.json`. `specs`: of the rounded projections by their modules' names; `ignored`: those left
    as they are."""
    by_spec: dict[LinearSpec, list[str]] = defaultdict(list)
    for module, spec in specs.items():
        by_spec[spec].append(module)
    ordered = sorted(by_spec.items(), key=lambda item: -len(item[1]))
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "config_groups": {
            # The most common form is that of all that no other group names.
            f"group_{number}": _group(scheme, spec, [_ALL] if number == 0 else modules)
            for number, (spec, modules) in enumerate(ordered)
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _group(scheme: Scheme, spec: LinearSpec, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": 4 if spec.kind == "int4" else 8,
        "type": "float" if spec.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if spec.group else "channel",
        "group_size": spec.group or None,
        "actorder": None,
        "dynamic": False,
    }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _PER_TOKEN if scheme in _ROUNDS_INPUT else None,
        "output_activations": None,
        "format": _FORMATS[scheme],
    }
