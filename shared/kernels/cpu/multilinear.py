"""`ExactSum` by C++: a multiplication and three additions a word."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.kernels.cpu.build import AUTO, CannotBuild, choose

Words = npt.NDArray[np.uint64]


def native_sum(path: Path) -> Callable[[Words, Words], int]:
    """The library's; it lets other threads run meanwhile."""
    function = ctypes.CDLL(str(path)).tandem_multilinear
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None

    def total(words: Words, keys: Words) -> int:
        """Σ words_i · keys_i, exactly; both `[num_words]`, contiguous."""
        assert words.shape == keys.shape
        assert words.flags.c_contiguous
        assert keys.flags.c_contiguous
        out = np.zeros(3, np.uint64)
        function(words.ctypes.data, keys.ctypes.data, len(words), out.ctypes.data)
        return int.from_bytes(out.tobytes(), "little")

    return total


def fastest_sum() -> Callable[[Words, Words], int] | None:
    """The native one; None where this machine has no library. Compiles it where it is not there yet."""
    try:
        return native_sum(choose(AUTO)[1])
    except CannotBuild:
        return None
