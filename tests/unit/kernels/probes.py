"""Triton functions that bring jit helpers' results out."""

# ruff: noqa: N803

import triton
import triton.language as tl

from shared.kernels.attention.jit import slot_offsets
from shared.kernels.sampling.philox_jit import philox_uniform


@triton.jit
def store_offsets(
    table, offsets, kv_len, block_stride, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """One program: `slot_offsets` of the positions 0 … TILE - 1 into offsets [TILE] int64."""
    positions = tl.arange(0, TILE)
    values = slot_offsets(table, positions, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
    tl.store(offsets + positions, values)


@triton.jit
def store_uniform(pairs, numbers):
    """Grid (n,): `philox_uniform` of pairs [n, 2] int64 into numbers [n] fp64."""
    row = tl.program_id(0)
    tl.store(numbers + row, philox_uniform(tl.load(pairs + 2 * row), tl.load(pairs + 2 * row + 1)))
