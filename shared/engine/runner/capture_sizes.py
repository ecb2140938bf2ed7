"""The sizes that steps are padded to: few enough to prepare each, close enough to waste little."""

from __future__ import annotations

from bisect import bisect_left


def capture_sizes(most: int) -> tuple[int, ...]:
    """Rising sizes up to `most`, itself the last: 1, 2, 4, then steps of 8 to 64, of 16 to 128, of 32 beyond.

    Above 8 a batch is padded by a third at most, and by less than a fifth from 40 on; a decode step of so few rows
    costs what reading the weights costs, whatever their number.
    """
    assert most >= 1
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most, 32)]
    return (*(size for size in sizes if size < most), most)


def token_sizes(most: int) -> tuple[int, ...]:
    """Rising token counts up to `most`, itself the last: steps of 8 to 64, then four to each doubling.

    From 32 on a step is padded by a quarter at most. Padding of prompts costs time, unlike that of few rows; more sizes
    would cost more memory and a longer start.
    """
    assert most >= 1
    sizes, size = [], 8
    while size < most:
        sizes.append(size)
        size += max(8, (1 << size.bit_length()) // 8)
    return (*sizes, most)


def padded_size(sizes: tuple[int, ...], size: int) -> int:
    """The smallest of the rising sizes that holds `size` rows, at most the last."""
    assert 1 <= size <= sizes[-1]
    return sizes[bisect_left(sizes, size)]
