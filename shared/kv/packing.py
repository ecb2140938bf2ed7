"""Blocks packed losslessly for a link that is slower than packing (decision 0420)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from shared.kv.encryption import SpareBuffers

Compression = Literal["auto", "off", "on"]
PACKED_DTYPES = ("float32", "bfloat16", "float16")
"""KV dtypes whose blocks can be packed. Blocks of states, which are in fp32, are packed by what they hold."""
_KEPT_OF_16 = 15
"""Sixteenths of a block: one whose packed form is longer than this share is sent as it is."""
_MEASURED = 3


class Packer(Protocol):
    """See `NativePacking`."""

    def pack(self, numbers: npt.NDArray[np.uint16], out: npt.NDArray[np.uint8]) -> int: ...
    def unpack(self, packed: npt.NDArray[np.uint8], numbers: npt.NDArray[np.uint16]) -> None: ...


@dataclass(frozen=True, slots=True)
class PackingRates:
    """Rates of one core, in bytes of the unpacked block a second."""

    pack_bytes_s: float
    unpack_bytes_s: float
    ratio: float
    """Packed bytes over those of the block."""


class BlockPacking:
    """Packs and unpacks blocks of one size in host memory. For any thread."""

    def __init__(self, packer: Packer, block_bytes: int, dtype: str) -> None:
        """`block_bytes` is a multiple of 8. `dtype`: of `PACKED_DTYPES`. Packs a few blocks to measure
        its rates, which takes milliseconds."""
        assert dtype in PACKED_DTYPES, f"blocks in {dtype} are not packed"
        self.block_bytes = block_bytes
        self._packer = packer
        self._spare = SpareBuffers()
        self._most = block_bytes * _KEPT_OF_16 // 16 // 8 * 8
        self.rates = self._measure(dtype)

    def pack(self, block: memoryview) -> memoryview | None:
        """A packed copy, to be given back; None where it would not be smaller."""
        buffer = self._spare.take(self.block_bytes)
        numbers = np.frombuffer(block, np.uint16)
        size = self._packer.pack(numbers, np.frombuffer(buffer, np.uint8, self._most))
        if not size:
            self._spare.give_back(buffer)
            return None
        return memoryview(buffer)[:size]

    def give_back(self, packed: memoryview) -> None:
        """Frees what `pack` gave, which is not read any more."""
        assert isinstance(packed.obj, bytearray)
        self._spare.give_back(packed.obj)

    def unpack(self, block: memoryview, num_bytes: int) -> None:
        """Makes of a block's first `num_bytes`, which are packed, the block, in place. Raises TransferFailed where they
        are damaged; then the memory has any content."""
        aside = self._spare.take(self.block_bytes)
        try:
            packed = np.frombuffer(aside, np.uint8, num_bytes)
            packed[:] = np.frombuffer(block, np.uint8, num_bytes)
            self._packer.unpack(packed, np.frombuffer(block, np.uint16))
        finally:
            self._spare.give_back(aside)

    def _measure(self, dtype: str) -> PackingRates:
        """Rates of packing and unpacking: the best of a few runs, since other processes disturb."""
        drawn = np.random.default_rng(0).standard_normal(self.block_bytes // 2, np.float32)
        numbers = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        if dtype != "bfloat16":
            numbers = drawn.astype(dtype).view(np.uint16)[: self.block_bytes // 2]
        out, size = np.zeros(self.block_bytes + 8192, np.uint8), 0

        def pack() -> None:
            nonlocal size
            size = self._packer.pack(numbers, out)

        pack_s = _best_s(pack)
        if not size:
            return PackingRates(self.block_bytes / pack_s, self.block_bytes / pack_s, 1.0)
        packed, back = out[:size].copy(), np.empty_like(numbers)
        unpack_s = _best_s(lambda: self._packer.unpack(packed, back))
        return PackingRates(self.block_bytes / pack_s, self.block_bytes / unpack_s, size / self.block_bytes)


def _best_s(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_MEASURED):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)
