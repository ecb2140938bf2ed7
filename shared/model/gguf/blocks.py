"""Blocks of GGUF's types, opened to codes of 4 or 8 bits as they stand there: to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import FLOATS4, INT4_MIDDLE, Piece, powers_of_two

_WIDE = 256
"""Numbers of a block of the types with K in their names; each is of 8 parts of 32, or 16 of 16."""
_INT8, _INT8_LOWS = LinearSpec("int8", 32), LinearSpec("int8", 32, has_zeros=True, has_lows=True)
_INT4, _INT4_LOWS = LinearSpec("int4", 32), LinearSpec("int4", 32, has_zeros=True, has_lows=True)
_INT8_16, _INT4_16 = LinearSpec("int8", 16), LinearSpec("int4", 16)
_INT4_16_LOWS = LinearSpec("int4", 16, has_zeros=True, has_lows=True)


@dataclass(frozen=True)
class BlockType:
    """One type of tensors."""

    name: str
    block: int  # numbers of a block
    num_bytes: int  # of a block
    open: Callable[[Tensor], Piece] | None = None
    """Opens uint8 [num_rows, blocks, num_bytes]; None: they are plain numbers of a dtype of that name."""
    spec: LinearSpec | None = None
    """The form of a Piece that `open` gives."""


def _halves(raw: Tensor) -> Tensor:
    """uint8 [..., 2] to fp32 [...]."""
    return raw.contiguous().view(torch.float16)[..., 0].float()


def _split(x: Tensor, count: int) -> Tensor:
    """[..., size] to [..., count, size / count]."""
    return x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


def _nibbles(packed: Tensor) -> Tensor:
    """Codes of 4 bits, two a byte: [..., n] to [..., 2 n], all lower ones first."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """Codes of 2 bits, four a byte: [..., 64] to [..., 2, 4, 32], the lowest bits of each 32 bytes first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return _split(packed, 2)[..., None, :] >> shifts & 3


def _piece(spec: LinearSpec, codes: Tensor, scales: Tensor, lows: Tensor | None = None) -> Piece:
    """Of codes [num_rows, ...], a scale and a low for each group."""
    codes = codes.to(torch.int8 if spec.kind == "int8" else torch.uint8).flatten(1)
    lows = None if lows is None else lows.flatten(1)
    return Piece(codes, scales.flatten(1), lows, spec.group, None, spec.kind, spec.has_lows)


def _q8_0(raw: Tensor) -> Piece:
    return _piece(_INT8, raw[..., 2:].contiguous().view(torch.int8), _halves(raw[..., :2]))


def _q4_0(raw: Tensor) -> Piece:
    return _piece(_INT4, _nibbles(raw[..., 2:]), _halves(raw[..., :2]))


def _q4_1(raw: Tensor) -> Piece:
    return _piece(_INT4_LOWS, _nibbles(raw[..., 4:]), _halves(raw[..., :2]), -_halves(raw[..., 2:4]))


def _codes_of_5(raw: Tensor) -> Tensor:
    """int8 [..., 32] of 4 bytes of highest bits and 16 of the others, two codes a byte."""
    codes = _nibbles(raw[..., 4:])
    bits = raw[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (codes | bits.flatten(-2) << 4).to(torch.int8)


def _q5_0(raw: Tensor) -> Piece:
    return _piece(_INT8, _codes_of_5(raw[..., 2:]) - 16, _halves(raw[..., :2]))


def _q5_1(raw: Tensor) -> Piece:
    return _piece(_INT8_LOWS, _codes_of_5(raw[..., 4:]), _halves(raw[..., :2]), -_halves(raw[..., 2:4]))


def _scales_and_lows(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and lows of a block's 8 parts: fp32 [..., 8] each, from 12 bytes of numbers of 6 bits and two scales of
    these."""
    packed = raw[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1).float()
    lows = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1).float()
    return scales * _halves(raw[..., :2])[..., None], lows * _halves(raw[..., 2:4])[..., None]


def _q4_k(raw: Tensor) -> Piece:
    return _piece(_INT4_LOWS, _nibbles(_split(raw[..., 16:], 4)), *_scales_and_lows(raw))


def _q5_k(raw: Tensor) -> Piece:
    lower = _split(_nibbles(_split(raw[..., 48:], 4)).flatten(-2), 8)  # [..., 8, 32]
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    return _piece(_INT8_LOWS, lower | (raw[..., None, 16:48] >> places & 1) << 4, *_scales_and_lows(raw))


def _q6_k(raw: Tensor) -> Piece:
    low = _split(raw[..., :128], 2)
    scales = raw[..., 192:208].contiguous().view(torch.int8).float() * _halves(raw[..., 208:])[..., None]
    of_low = torch.stack((low[..., :32], low[..., 32:], low[..., :32] >> 4, low[..., 32:] >> 4), -2) & 15
    codes = of_low | _pairs_of_bits(raw[..., 128:192]) << 4  # [..., 2, 4, 32]
    return _piece(_INT8_16, codes.to(torch.int8) - 32, scales)


def _q2_k(raw: Tensor) -> Piece:
    scales = (raw[..., :16] & 15).float() * _halves(raw[..., 80:82])[..., None]
    lows = (raw[..., :16] >> 4).float() * _halves(raw[..., 82:])[..., None]
    return _piece(_INT4_16_LOWS, _pairs_of_bits(raw[..., 16:80]), scales, lows)


def _q3_k(raw: Tensor) -> Piece:
    first, second, third = raw[..., 96:100], raw[..., 100:104], raw[..., 104:108]
    packed = torch.cat((first & 15, second & 15, first >> 4, second >> 4), -1)
    upper = torch.cat([third >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    scales = ((packed | upper << 4).float() - 32) * _halves(raw[..., 108:])[..., None]
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    highest = raw[..., None, :32] >> places & 1  # [..., 8, 32]
    codes = _pairs_of_bits(raw[..., 32:96]).flatten(-3, -2) | highest << 2
    return _piece(_INT4_16, codes + (INT4_MIDDLE - 4), scales)


_UNEVEN = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
"""What codes of IQ4 stand for."""


def _iq4_nl(raw: Tensor) -> Piece:
    return _piece(_INT8, _UNEVEN[_nibbles(raw[..., 2:]).int()], _halves(raw[..., :2]))


def _iq4_xs(raw: Tensor) -> Piece:
    lower = torch.stack((raw[..., 4:8] & 15, raw[..., 4:8] >> 4), -1).flatten(-2)
    upper = torch.stack([raw[..., 2 + part // 4] >> 2 * (part % 4) & 3 for part in range(8)], -1)
    scales = ((lower | upper << 4).float() - 32) * _halves(raw[..., :2])[..., None]
    return _piece(_INT8, _UNEVEN[_nibbles(_split(raw[..., 8:], 8)).int()], scales)


_DOUBLED = (2 * FLOATS4).to(torch.int8)
"""Floats of 4 bits are halves of whole numbers."""


def _mxfp4(raw: Tensor) -> Piece:
    return _piece(_INT8, _DOUBLED[_nibbles(raw[..., 1:]).int()], powers_of_two(raw[..., :1]) / 2)


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18, _q4_0, _INT4),
    3: BlockType("Q4_1", 32, 20, _q4_1, _INT4_LOWS),
    6: BlockType("Q5_0", 32, 22, _q5_0, _INT8),
    7: BlockType("Q5_1", 32, 24, _q5_1, _INT8_LOWS),
    8: BlockType("Q8_0", 32, 34, _q8_0, _INT8),
    10: BlockType("Q2_K", _WIDE, 84, _q2_k, _INT4_16_LOWS),
    11: BlockType("Q3_K", _WIDE, 110, _q3_k, _INT4_16),
    12: BlockType("Q4_K", _WIDE, 144, _q4_k, _INT4_LOWS),
    13: BlockType("Q5_K", _WIDE, 176, _q5_k, _INT8_LOWS),
    14: BlockType("Q6_K", _WIDE, 210, _q6_k, _INT8_16),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl, _INT8),
    23: BlockType("IQ4_XS", _WIDE, 136, _iq4_xs, _INT8),
    39: BlockType("MXFP4", 32, 17, _mxfp4, _INT8),
}
"""Kinds of blocks by their numbers in a file."""
BLOCKS = {kind.name: kind for kind in TYPES.values() if kind.open is not None}
"""The types that are no plain numbers, by name."""
