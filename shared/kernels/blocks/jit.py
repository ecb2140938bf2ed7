"""Whole blocks in Triton, as runs of 64-bit words."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["block_ids"])
def copy_blocks(
    source,  # [any, num_words] int64
    target,  # [any, num_words] int64
    block_ids,  # [num_blocks] int64: rows of the side that is the pool
    num_words,
    GATHERS: tl.constexpr,  # the pool is the source, else the target
    TILE: tl.constexpr,
):
    """Grid (num_blocks * ceil(num_words / TILE),): a stretch of one block."""
    num_tiles = (num_words + TILE - 1) // TILE
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    words = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    block_id = tl.load(block_ids + row)
    if GATHERS:
        source += block_id * num_words
        target += row * num_words
    else:
        source += row * num_words
        target += block_id * num_words
    tl.store(target + words, tl.load(source + words, mask=words < num_words), mask=words < num_words)


@triton.jit
def checksum_weight(index):
    """`2 · splitmix64(index) + 1` mod 2^64 of uint64 indexes: the weights of `shared.kv.checksum`."""
    z = index + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) << 1) | 1


@triton.jit(do_not_specialize=["block_ids", "num_blocks"])
def checksum_stretches(
    words,  # [any, num_words] int64
    block_ids,  # [num_blocks] int64
    sums,  # [num_blocks, num_stretches] int64
    num_blocks,
    num_words,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """Grid (num_stretches, ceil(num_blocks / BLOCKS)): a stretch of some blocks; a weight serves all of these."""
    stretch = tl.program_id(0)
    rows = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    bases = words + tl.load(block_ids + rows, mask=rows < num_blocks, other=0) * num_words
    total = tl.zeros([BLOCKS, TILE], tl.uint64)
    first = stretch * STRETCH
    for start in range(first, tl.minimum(first + STRETCH, num_words), TILE):
        indexes = start + tl.arange(0, TILE)
        real = (rows < num_blocks)[:, None] & (indexes < num_words)[None, :]
        values = tl.load(bases[:, None] + indexes[None, :], mask=real, other=0).to(tl.uint64)
        total += values * checksum_weight(indexes.to(tl.uint64))[None, :]
    places = sums + rows.to(tl.int64) * tl.num_programs(0) + stretch
    tl.store(places, tl.sum(total.to(tl.int64), 1), mask=rows < num_blocks)


@triton.jit(do_not_specialize=["block_ids", "num_blocks"])
def key_sum_stretches(
    words,  # [any, num_words] int64
    block_ids,  # [num_blocks] int64
    keys,  # [num_words] int64
    sums,  # [num_blocks, num_stretches, 4] int64
    num_blocks,
    num_words,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """Grid (num_stretches, ceil(num_blocks / BLOCKS)): a stretch of some blocks; a key serves all of these. Products
    of 128 bits are added in four parts of 32, each in 64 bits, so that nothing is carried over."""
    stretch = tl.program_id(0)
    rows = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    bases = words + tl.load(block_ids + rows, mask=rows < num_blocks, other=0) * num_words
    sum0 = tl.zeros([BLOCKS, TILE], tl.uint64)
    sum1 = tl.zeros([BLOCKS, TILE], tl.uint64)
    sum2 = tl.zeros([BLOCKS, TILE], tl.uint64)
    sum3 = tl.zeros([BLOCKS, TILE], tl.uint64)
    first = stretch * STRETCH
    for start in range(first, tl.minimum(first + STRETCH, num_words), TILE):
        indexes = start + tl.arange(0, TILE)
        real = (rows < num_blocks)[:, None] & (indexes < num_words)[None, :]
        values = tl.load(bases[:, None] + indexes[None, :], mask=real, other=0).to(tl.uint64)
        factors = tl.load(keys + indexes, mask=indexes < num_words, other=0).to(tl.uint64)
        factors = tl.broadcast_to(factors[None, :], (BLOCKS, TILE))
        low, high = values * factors, tl.umulhi(values, factors)
        sum0 += low & 0xFFFFFFFF
        sum1 += low >> 32
        sum2 += high & 0xFFFFFFFF
        sum3 += high >> 32
    places = sums + (rows.to(tl.int64) * tl.num_programs(0) + stretch) * 4
    tl.store(places, tl.sum(sum0.to(tl.int64), 1), mask=rows < num_blocks)
    tl.store(places + 1, tl.sum(sum1.to(tl.int64), 1), mask=rows < num_blocks)
    tl.store(places + 2, tl.sum(sum2.to(tl.int64), 1), mask=rows < num_blocks)
    tl.store(places + 3, tl.sum(sum3.to(tl.int64), 1), mask=rows < num_blocks)
