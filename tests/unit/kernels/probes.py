"""Triton functions that bring jit helpers' results out."""

# ruff: noqa: N803

import triton
import triton.language as tl

from shared.kernels.attention.jit import slot_offsets
from shared.kernels.sampling.philox_jit import times_of_tokens


@triton.jit
def store_offsets(
    table, offsets, kv_len, block_stride, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """One program: `slot_offsets` of the positions 0 … TILE - 1 into offsets [TILE] int64."""
    positions = tl.arange(0, TILE)
    values = slot_offsets(table, positions, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
    tl.store(offsets + positions, values)


@triton.jit
def store_times(triples, times):
    """Grid (n,): `times_of_tokens` of (seed, position, token) [n, 3] int64 into times [n] fp32."""
    row = tl.program_id(0)
    token = tl.load(triples + 3 * row + 2).to(tl.int32) + tl.arange(0, 1)
    found = times_of_tokens(tl.load(triples + 3 * row), tl.load(triples + 3 * row + 1), token)
    tl.store(times + row + tl.arange(0, 1), found)
