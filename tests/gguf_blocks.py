"""Blocks of GGUF's types, packed from the format's definition, and the numbers that they stand for."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from tests.quantized_checkpoints import FP4_E2M1


def half(number: float) -> tuple[bytes, float]:
    raw = struct.pack("<e", number)
    return raw, struct.unpack("<e", raw)[0]


def packed(kind: str, weight: Tensor) -> tuple[bytes, Tensor]:
    """(blocks of rows, the weight that they stand for)."""
    raw, opened = b"", []
    make = {
        "Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q6_K": _q6_k, "Q2_K": _q2_k,
        "Q3_K": _q3_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
        "MXFP4": _mxfp4,
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


FLOATS4 = [sign * number for sign in (1, -1) for number in FP4_E2M1]


def _mxfp4(block: Tensor) -> tuple[bytes, list[float]]:
    exponent = math.ceil(math.log2(float(block.abs().max()) / 6))
    scale = 2.0**exponent
    codes = [min(range(16), key=lambda code: abs(FLOATS4[code] * scale - x)) for x in block.tolist()]
    pairs = bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
    return bytes([exponent + 127]) + pairs, [scale * FLOATS4[code] for code in codes]
