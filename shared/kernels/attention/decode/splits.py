"""How decode attention cuts its work into parts: numbers alone, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kernels.device import DeviceLimits


@dataclass(frozen=True)
class DecodeConfig:
    """Sizes that a launch is compiled for."""

    tile: int  # tokens of one step of a part
    min_tiles: int  # tiles of a part, at least: a shorter one costs more in the merge than it gains
    parts_per_multiprocessor: int  # parts to aim at, where they come out about equally long
    num_warps: int
    num_stages: int  # tiles in flight
    uneven_parts: int = 0  # likewise where they do not: more even out; 0: as many


def decode_config(head_dim: int, element_bytes: int, limits: DeviceLimits, group: int = 2) -> DecodeConfig:
    """Tiles whose stages leave room for several parts side by side in a multiprocessor's shared memory.

    A stage holds K and V: `2 * tile * head_dim * element_bytes`, 32 KiB for 64 tokens of 128 dims in 16 bits.
    Two of three stages lie there at once, beside 4 KiB of the query. Where a key serves one query head alone there is
    next to nothing to compute, and one more stage keeps memory busy; wide heads fill it with two.

    A part waits for its table entries, its first keys and the merge whatever its length, and two of equal length side
    by side read as fast as a multiprocessor can: more are only worth their waits where lengths differ (measured on an
    H100 and an H200, see docs/benchmarks/engine/gpu.md).

    Args:
        head_dim: of a head.
        element_bytes: of the query.
        limits: of the device.
        group: query heads that share a KV head.
    """
    row_bytes = head_dim * element_bytes
    has_room = limits.shared_bytes > 160 * 1024
    tile = 64 if row_bytes <= 256 or (row_bytes <= 512 and has_room) else 32 if row_bytes <= 512 else 16
    num_stages = 2 if limits.shared_bytes <= 64 * 1024 or tile * row_bytes > 16 * 1024 else 3
    if has_room and group == 1 and num_stages == 3:
        num_stages = 4
    return DecodeConfig(tile, max(1, 128 // tile), 2, num_warps=4, num_stages=num_stages, uneven_parts=3)


def most_rows(head_dim: int, element_bytes: int) -> int:
    """Most rows, query heads times tokens, for which a program has registers, with heads of `head_dim` elements."""
    return 64 if head_dim * element_bytes <= 256 else 32


@dataclass(frozen=True)
class DecodeGrid:
    """The static shape of a launch: it depends on the batch and its capacity, never on the current lengths."""

    num_items: int  # parts to aim at for each KV head, beyond one for each sequence
    num_uneven_items: int  # likewise where these would be of different length
    num_slots: int  # parts that there can be for each KV head
    has_merge: bool  # whether any sequence can have several parts


def decode_grid(
    num_seqs: int, capacity: int, num_kv_heads: int, num_multiprocessors: int, config: DecodeConfig
) -> DecodeGrid:
    """Choose the number of parts.

    The kernel makes each part `ceil(tiles of the batch / num_items)` tiles long, `min_tiles` at least, so a batch
    of long sequences is cut into about `parts_per_multiprocessor` parts for each multiprocessor, a batch of short
    ones into fewer. Where parts would differ much in length it takes `num_uneven_items` instead.

    Args:
        num_seqs: rows of the batch.
        capacity: keys that a sequence can come to see, at most.
        num_kv_heads: each makes a column of the grid.
        num_multiprocessors: of the device.
        config: the launch's sizes.
    """
    most_parts = max(1, -(-capacity // (config.tile * config.min_tiles)))  # of one sequence
    most = num_seqs * most_parts

    def aimed_at(parts: int) -> int:
        return max(1, min(-(-parts * num_multiprocessors // num_kv_heads), most))

    num_items = aimed_at(config.parts_per_multiprocessor)
    num_uneven_items = aimed_at(config.uneven_parts or config.parts_per_multiprocessor)
    num_slots = min(max(num_items, num_uneven_items) + num_seqs, most)
    return DecodeGrid(num_items, num_uneven_items, num_slots, has_merge=most_parts > 1)
