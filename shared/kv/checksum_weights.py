"""The weights of a block's checksum (see checksum.py), and the checksum itself, for processes without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def checksum_weights(num_words: int) -> npt.NDArray[np.uint64]:
    """`2·splitmix64(i) + 1 mod 2^64` for i in 0 … num_words - 1; shape `[num_words]`."""
    z = np.arange(num_words, dtype=np.uint64)
    z += np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z << np.uint64(1)) | np.uint64(1)


def weighted_sum(words: npt.NDArray[np.uint64], weights: npt.NDArray[np.uint64]) -> int:
    """Checksum in [0, 2^64) of a block's words, read in place; both `[num_words]`."""
    # einsum reads the block once; a product would write a temporary first.
    return int(np.einsum("i,i->", words, weights))
