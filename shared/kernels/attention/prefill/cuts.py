"""How a long chunk is cut for attention that computes whole shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.kernels.batch import AttentionBatch

UNIT = 1024
"""Every side of a cut is a multiple of this number of tokens: a shape that is new costs some 50 ms."""
MOST_KEYS = 16
"""Units of a rectangle's keys at most, which bounds the memory that they are gathered in."""
LEAST_TOKENS = UNIT
"""Query tokens of a chunk that is long."""
TIME_OF_PAIR = 0.7
"""Time of a pair over that of a pair in the kernel for any chunk, measured on an H200."""
PAIRS_OF_CALL = 800_000 * 32
"""Time of the copies around a chunk, in pairs times query heads of the kernel for any chunk, measured on an H200."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Queries that see all of some keys."""

    first_row: int
    """First of the chunk's own rows; the last rectangle of a chunk may reach past its end."""
    rows: int
    first_key: int
    keys: int


@dataclass(frozen=True, slots=True)
class ChunkCut:
    """A chunk's queries and keys, each pair that sees each other in one part: a causal square and rectangles."""

    lead: int
    """Tokens of the context with which the square begins; what they attend to is dropped."""
    square: int
    """The square's side in tokens: `lead`, the chunk, and what fills the last unit."""
    rectangles: tuple[Rectangle, ...]

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that are computed."""
        return self.square * (self.square + 1) // 2 + sum(part.rows * part.keys for part in self.rectangles)


def cut_chunk(query_len: int, kv_len: int, unit: int = UNIT) -> ChunkCut:
    """The cut of the last `query_len` of `kv_len` tokens, by sides of few sizes: multiples of `unit` for a square,
    powers of two times `unit` for a rectangle."""
    assert 1 <= query_len <= kv_len
    context = kv_len - query_len
    lead = context % unit
    rectangles = tuple(
        Rectangle(first_row, rows, first_key, keys)
        for first_key, keys in _powers(context - lead, unit, MOST_KEYS)
        for first_row, rows in _powers(query_len, unit)
    )
    return ChunkCut(lead, _up(lead + query_len, unit), rectangles)


def shapes_until(square: int, unit: int = UNIT) -> tuple[list[int], list[tuple[int, int]]]:
    """All squares of chunks whose own is not larger, and (rows, keys) of all their rectangles."""
    powers = [unit << power for power in range((square // unit).bit_length())]
    keys = [size for size in (unit << power for power in range(MOST_KEYS.bit_length())) if size <= MOST_KEYS * unit]
    return list(range(unit, square + 1, unit)), [(rows, size) for rows in powers for size in keys]


def num_pairs(query_len: int, kv_len: int) -> int:
    """Pairs of a chunk's query and a key that it sees."""
    return query_len * kv_len - query_len * (query_len - 1) // 2


def long_chunks(batch: AttentionBatch, num_heads: int) -> tuple[int, ...]:
    """The sequences whose chunks are long: all of a step or none, by which takes less time."""
    found = [i for i, count in enumerate(batch.query_lens) if count >= LEAST_TOKENS]
    usual = cut = 0
    for i in found:
        usual += num_pairs(batch.query_lens[i], batch.kv_lens[i])
        cut += cut_chunk(batch.query_lens[i], batch.kv_lens[i]).num_pairs
    is_faster = TIME_OF_PAIR * cut * num_heads + PAIRS_OF_CALL * len(found) < usual * num_heads
    return tuple(found) if is_faster else ()


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _powers(count: int, unit: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """(begin, size) of stretches that cover 0 to `count`, rounded up to a unit: the longest ones first."""
    begin, units = 0, -(-count // unit)
    while units:
        size = 1 << (units.bit_length() - 1)
        size = min(size, most or size)
        yield begin * unit, size * unit
        begin, units = begin + size, units - size
