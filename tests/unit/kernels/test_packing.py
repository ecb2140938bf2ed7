"""Packed blocks: the C++ kernels and the reference make the same bytes, which open to the same bits; damaged ones are
refused."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import TransferFailed
from shared.kernels.cpu.build import AUTO, choose
from shared.kernels.cpu.packing import NativePacking
from shared.kernels.packing import reference

from .isas import needs_library

pytestmark = needs_library
SIZES = (1, 3, 64, 68, 2047, 2048, 2049, 5000)


@pytest.fixture(scope="module")
def native() -> NativePacking:
    return NativePacking(choose(AUTO)[1])


def numbers(kind: str, count: int) -> np.ndarray:
    random = np.random.default_rng(count)
    if kind == "any bits":
        return random.integers(0, 1 << 16, count, dtype=np.uint16)
    wide = random.standard_normal(count).astype(np.float32)
    if kind == "fp32":
        return wide.view(np.uint16)[:count]
    if kind == "fp16":
        return wide.astype(np.float16).view(np.uint16)
    drawn = (wide.view(np.uint32) >> 16).astype(np.uint16)
    special = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 1, 0x807F], np.uint16)  # zeros, infinities, NaN, subnormal
    if kind == "special":
        drawn[:: max(1, count // 20)] = special[np.arange(len(drawn[:: max(1, count // 20)])) % len(special)]
    return drawn if kind != "one" else np.full(count, 0x3F80, np.uint16)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", ["normal", "special", "any bits", "fp16", "fp32", "one"])
def test_packed_blocks_open_to_the_same_bits_and_have_the_reference_s_bytes(native, kind, count):
    given = numbers(kind, count)
    expected = reference.pack(given)
    assert (reference.unpack(expected, count) == given).all()
    back = np.empty_like(given)
    native.unpack(np.frombuffer(expected, np.uint8), back)
    assert (back == given).all()
    out = np.zeros(len(expected), np.uint8)
    assert native.pack(given, out) == len(expected)
    assert out.tobytes() == expected


def test_every_pattern_of_16_bits_survives(native):
    given = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint16))
    for sample in (given, np.sort(given)):
        packed, back = reference.pack(sample), np.empty_like(sample)
        native.unpack(np.frombuffer(packed, np.uint8), back)
        assert (back == sample).all()


def test_what_does_not_shrink_or_does_not_fit_is_not_packed(native):
    given = numbers("any bits", 1 << 17)
    assert native.pack(given, np.zeros(given.nbytes + 4096, np.uint8)) == 0
    given = numbers("normal", 4096)
    assert native.pack(given, np.zeros(len(reference.pack(given)) - 8, np.uint8)) == 0


def test_numbers_of_32_bits_shrink_by_a_seventh(native):
    given = numbers("fp32", 1 << 16)
    assert 0 < native.pack(given, np.zeros(given.nbytes, np.uint8)) < given.nbytes * 6 / 7


@pytest.mark.parametrize("kind", ["special", "fp32"])
def test_hostile_bytes_are_refused_and_nothing_beside_the_block_is_written(native, kind):
    random, count = np.random.default_rng(1), 3000
    sound = np.frombuffer(reference.pack(numbers(kind, count)), np.uint8)
    memory = np.full(count + 64, 0xABCD, np.uint16)
    for turn in range(2000):
        packed = sound.copy()
        places = random.integers(0, min(len(packed), (12, len(packed))[turn % 2]), 1 + turn % 3)
        packed[places] = random.integers(0, 256, len(places))
        packed = packed[: random.integers(0, len(packed) + 1)] if turn % 5 == 0 else packed
        try:
            expected = reference.unpack(packed.tobytes(), count)
        except TransferFailed:
            with pytest.raises(TransferFailed) as refused:
                native.unpack(packed, memory[32:-32])
            assert refused.value.field == "packed_bytes"
        else:
            native.unpack(packed, memory[32:-32])
            assert (memory[32:-32] == expected).all()
        assert (memory[:32] == 0xABCD).all()
        assert (memory[-32:] == 0xABCD).all()
