"""Packing of blocks by C++: the format of `shared.kernels.packing.reference`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import TransferFailed
from shared.kernels.cpu.build import AUTO, CannotBuild, choose

Halves = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
_FAULTS = {
    1: "it is not one of this version and size",
    2: "it ends too early",
    3: "its codes have a number of bits that there is not",
    4: "it has another count of rare exponents than codes",
    5: "it has bytes behind its end",
}


class NativePacking:
    """The library's pair; both let other threads run meanwhile."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._pack, self._unpack = library.tandem_pack, library.tandem_unpack
        place, count = ctypes.c_void_p, ctypes.c_int64
        self._pack.argtypes, self._pack.restype = [place, count, place, count], count
        self._unpack.argtypes, self._unpack.restype = [place, count, place, count], ctypes.c_int

    def pack(self, numbers: Halves, out: Bytes) -> int:
        """Packs `numbers` [n] into `out` [capacity]. Returns the bytes taken, a multiple of 8; 0 where `out` does not
        suffice, or the numbers do not shrink by a sixteenth or more."""
        assert numbers.flags.c_contiguous
        assert out.flags.c_contiguous
        return int(self._pack(numbers.ctypes.data, len(numbers), out.ctypes.data, len(out)))

    def unpack(self, packed: Bytes, numbers: Halves) -> None:
        """Fills `numbers` [n] from `packed` [bytes], which lie apart. Raises TransferFailed for bytes that are no
        packed block of n numbers; then `numbers` have any content."""
        assert packed.flags.c_contiguous
        assert numbers.flags.c_contiguous
        fault = self._unpack(packed.ctypes.data, len(packed), numbers.ctypes.data, len(numbers))
        if fault:
            raise TransferFailed(f"a packed block is damaged: {_FAULTS[fault]}", field="packed_bytes")


def fastest_packing() -> NativePacking | None:
    """None where this machine has no library. Compiles it where it is not there yet."""
    try:
        return NativePacking(choose(AUTO)[1])
    except CannotBuild:
        return None
