"""The packed form of a block, in numpy: the C++ kernels (`cpu/source/packing.cpp`) make and read the same bytes.

Of bf16 numbers nearly all exponents lie in a short range, so that 8 bits of each say little; what is in that range by
place takes 3 or 4 bits. (fp16 goes the same way: the 8 bits are then exponent and three bits of the fraction.) Of fp32
numbers, as states are, the upper halves are bf16 numbers, and the lower halves are kept.

- 8 bytes: version as u32, count of numbers as u32; all little-endian.
- For each 2,048 numbers, the last time for what is left: bits of a code (1 to 7, or 16: the numbers follow as they
  are; 32 is added where the chunk is of 1,024 numbers of 32 bits), first exponent of the range, u16 count of rare
  exponents. Then the lower halves of numbers of 32 bits. Then a byte a number: its fraction, or the first 7 bits of it,
  and, lowest, the sign. Then the codes, a plane of bits after another, each in whole bytes. Then the rare exponents, a
  byte each, in order: those whose code is the highest.
- Zeros up to a multiple of 8 bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import TransferFailed

CHUNK = 2048
RAW = 16
HALVES = 32
MOST_BITS = 7
VERSION = 1
_SAMPLED = 4
_HEAD = struct.Struct("<II")
_CHUNK_HEAD = struct.Struct("<BBH")
Halves = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


def pack(numbers: Halves) -> bytes:
    """The packed form of numbers, [n]; longer than they are where they do not shrink."""
    chunks = [_pack_chunk(numbers[start : start + CHUNK]) for start in range(0, len(numbers), CHUNK)]
    packed = _HEAD.pack(VERSION, len(numbers)) + b"".join(chunks)
    return packed + bytes(-len(packed) % 8)


def unpack(packed: bytes, num_numbers: int) -> Halves:
    """Inverse of `pack`, [num_numbers]. Raises TransferFailed for bytes that are not a packed block of this size."""
    if len(packed) < _HEAD.size or _HEAD.unpack_from(packed) != (VERSION, num_numbers):
        raise TransferFailed(f"no packed block of {num_numbers} numbers", field="packed_bytes")
    place, numbers = _HEAD.size, np.empty(num_numbers, np.uint16)
    for start in range(0, num_numbers, CHUNK):
        part = numbers[start : start + CHUNK]
        place = _unpack_chunk(packed, place, part)
    if not 0 <= len(packed) - place < 8:
        raise TransferFailed("a packed block has bytes behind its end", field="packed_bytes")
    return numbers


def _pack_chunk(numbers: Halves) -> bytes:
    raw = _CHUNK_HEAD.pack(RAW, 0, 0) + numbers.astype("<u2").tobytes()
    packed = _pack_numbers(numbers, b"", 0)
    if len(numbers) % 2 == 0 and (packed is None or len(packed) >= len(raw)):
        packed = _pack_numbers(numbers[1::2], numbers[::2].astype("<u2").tobytes(), HALVES)
    return packed if packed is not None and len(packed) < len(raw) else raw


def _pack_numbers(numbers: Halves, halves: bytes, kind: int) -> bytes | None:
    """A chunk of these numbers, or upper halves of them, behind the lower ones; None: nothing is gained."""
    turned = numbers << 1 | numbers >> 15
    low, high = (turned & 0xFF).astype(np.uint8), (turned >> 8).astype(np.uint8)
    bits, first = _choose_range(high[::_SAMPLED])
    if bits == RAW:
        return None
    last = (1 << bits) - 1
    codes = np.minimum(high - np.uint8(first), np.uint8(last))
    planes = [np.packbits(codes >> bit & 1, bitorder="little").tobytes() for bit in range(bits)]
    rare = high[codes == last]
    head = _CHUNK_HEAD.pack(bits | kind, first, len(rare))
    return b"".join((head, halves, low.tobytes(), *planes, rare.tobytes()))


def _choose_range(sample: Bytes) -> tuple[int, int]:
    """Bits of a code, and exponent of code 0: what takes the fewest bits of the sample, the first of equals."""
    counts = np.bincount(sample, minlength=256)
    lowest, highest = int(sample.min()), int(sample.max())
    best, fewest = (RAW, 0), 8 * len(sample)
    for bits in range(1, MOST_BITS + 1):
        width = (1 << bits) - 1
        most, first = 0, lowest
        for exponent in range(lowest, highest + 1):
            begin = max(lowest, exponent - width + 1)
            inside = int(counts[begin : exponent + 1].sum())
            if inside > most:
                most, first = inside, begin
        cost = bits * len(sample) + 8 * (len(sample) - most)
        if cost < fewest:
            best, fewest = (bits, first), cost
        if most == len(sample):
            break
    return best


def _unpack_chunk(packed: bytes, place: int, numbers: Halves) -> int:
    """Fills `numbers`; returns the place behind the chunk."""
    count = len(numbers)

    def take(num_bytes: int) -> npt.NDArray[Any]:
        nonlocal place
        if place + num_bytes > len(packed):
            raise TransferFailed("a packed block ends too early", field="packed_bytes")
        place += num_bytes
        return np.frombuffer(packed, np.uint8, num_bytes, place - num_bytes)

    kind, first, num_rare = _CHUNK_HEAD.unpack(take(_CHUNK_HEAD.size).tobytes())
    if kind == RAW:
        numbers[:] = take(2 * count).view("<u2")
        return place
    bits = kind & ~HALVES
    if not 1 <= bits <= MOST_BITS or (kind & HALVES and count % 2):
        raise TransferFailed(f"a packed block has codes of {bits} bits", field="packed_bytes", limit=MOST_BITS)
    if kind & HALVES:
        count //= 2
        numbers[::2] = take(2 * count).view("<u2")
        numbers = numbers[1::2]
    low = take(count).astype(np.uint16)
    codes = np.zeros(count, np.uint8)
    for bit in range(bits):
        codes |= np.unpackbits(take(-(-count // 8)), count=count, bitorder="little") << bit
    is_rare = codes == (1 << bits) - 1
    if int(is_rare.sum()) != num_rare:
        raise TransferFailed("a packed block has another count of rare exponents than codes", field="packed_bytes")
    high = codes + np.uint8(first)
    high[is_rare] = take(num_rare)
    turned = low | high.astype(np.uint16) << 8
    numbers[:] = turned >> 1 | turned << 15
    return place
