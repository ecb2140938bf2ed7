"""How weights in codes lie in a GPU's memory: what a program reads in one step is contiguous, in one piece or a few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.linear_spec import Kind
from shared.kernels.quantized import INT4_MIDDLE, QuantizedWeight, unpack_nibbles

GRANULE = 64
"""Rows that lie together."""
TILE = 256
"""The most rows that a program takes; rows are padded to a multiple of it."""
DEPTHS = (128, 64, 32)
"""Columns of a step."""
LEAST_WIDTH = 16
"""Columns of a part of a step: the fewest that matrix units add up."""
PARTS = {"int4": 4, "int8": 2, "fp8": 2}
"""Codes of a word of 16 bits."""
_LAID_OUT = 1 << 24
"""Codes that are laid out at a time: beside the weight itself, only theirs are there a few times."""


def step_columns(kind: Kind, group: int) -> int | None:
    """Columns of a step for groups of this many (0: whole rows), or None where the kernels do not read such groups."""
    for depth in DEPTHS:
        width = depth // PARTS[kind]
        if width >= LEAST_WIDTH and (group % depth == 0 or (depth % group == 0 and group % width == 0)):
            return depth
    return None


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight [out_size, in_size] without an index, as shared/kernels/coded/jit.py reads it."""

    kind: Kind | Literal["whole"]
    out_size: int
    in_size: int
    group: int  # columns that share a scale; 0: those of a row
    depth: int  # columns of a step
    codes: Tensor  # uint16, flat; of "whole" int8 [padded_size, in_size]
    scales: Tensor  # [num_groups, padded_size] fp32
    zeros: Tensor | None  # [num_groups, padded_size] fp32: loads of 16 bits are not started ahead, and each step waited

    @property
    def padded_size(self) -> int:
        """Rows that are there."""
        return self.scales.shape[1]

    @property
    def steps(self) -> int:
        """Steps of a row, the last one padded."""
        return -(-self.in_size // self.depth)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @classmethod
    def lay_out(cls, weight: QuantizedWeight, *, whole: bool = False) -> CodedWeight:
        """Lays out a weight and frees it.

        Args:
            weight: of groups that `step_columns` takes.
            whole: int8 rows that are multiplied with int8; in_size is a multiple of DEPTHS[0].
        """
        spec = weight.spec
        assert weight.index is None
        group = 0 if spec.group >= weight.in_size else spec.group
        depth = step_columns(spec.kind, group)
        assert depth is not None, f"groups of {group}"
        padded_size, steps = -(-weight.out_size // TILE) * TILE, -(-weight.in_size // depth)
        if whole:
            assert spec.kind == "int8"
            assert group == 0
            assert weight.in_size % depth == 0
            missing = padded_size - weight.out_size
            codes = functional.pad(weight.codes, (0, 0, 0, missing)) if missing else weight.codes
        else:
            codes = _words(weight, depth, padded_size, steps)
        num_groups = -(-steps * depth // group) if group else 1
        scales = _by_group(weight.scales, num_groups, padded_size)
        zeros = None if weight.zeros is None else _by_group(weight.zeros.float(), num_groups, padded_size)
        if codes is not weight.codes:
            weight.free()
        kind = "whole" if whole else spec.kind
        return cls(kind, weight.out_size, weight.in_size, group, depth, codes, scales, zeros)


def _by_group(values: Tensor, num_groups: int, padded_size: int) -> Tensor:
    """[rows, groups] to [num_groups, padded_size]: steps and rows that are padded have a scale of 0."""
    found = values.new_zeros((num_groups, padded_size))
    found[: values.shape[1], : values.shape[0]] = values.t()
    return found


def _words(weight: QuantizedWeight, depth: int, padded_size: int, steps: int) -> Tensor:
    """uint16, flat: see jit.py."""
    kind = weight.spec.kind
    width = depth // PARTS[kind]
    found = torch.zeros(padded_size // GRANULE, steps, GRANULE, width, dtype=torch.int16, device=weight.device)
    at_once = max(1, _LAID_OUT // (weight.in_size * GRANULE)) * GRANULE
    for first in range(0, weight.out_size, at_once):
        some = weight.rows(first, min(first + at_once, weight.out_size))
        codes = unpack_nibbles(some.codes) if kind == "int4" else some.codes.view(torch.uint8)
        empty = INT4_MIDDLE if kind == "int4" else 0
        codes = functional.pad(codes, (0, steps * depth - weight.in_size, 0, -codes.shape[0] % GRANULE), value=empty)
        parts = codes.view(-1, GRANULE, steps, PARTS[kind], width).unbind(3)
        words = torch.zeros_like(parts[0], dtype=torch.int16)
        for number, part in enumerate(parts):
            words |= part.to(torch.int16) << (number * 16 // PARTS[kind])
        place = first // GRANULE
        found[place : place + len(words)] = words.transpose(1, 2)
    return found.view(torch.uint16).view(-1)
