"""The schedule of a decode step, worked out on the device once for all layers.

The lengths are on the device, and the grid depends on the batch size alone. So a captured CUDA graph stays right while
sequences grow: the schedule is captured with it.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.attention.jit import first_seen

# Columns of a work item, int32.
SEQ = tl.constexpr(0)  # row of the block tables; -1 = no work
TOKEN = tl.constexpr(1)  # row of the query
KV_LEN = tl.constexpr(2)
BEGIN = tl.constexpr(3)  # first tile of keys
END = tl.constexpr(4)  # tile to stop before
NUM_PARTS = tl.constexpr(5)  # parts of the sequence
FIRST_SLOT = tl.constexpr(6)  # the item of its first part
QUERY_LEN = tl.constexpr(7)
WIDTH = tl.constexpr(8)


@triton.jit
def is_served(query_len, QUERIES: tl.constexpr):
    """Whether a sequence has 1 to QUERIES tokens. Scalars or vectors."""
    if QUERIES == 1:
        return query_len == 1
    return (query_len >= 1) & (query_len <= QUERIES)


@triton.jit
def tiles_seen(
    query_len, kv_len, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, QUERIES: tl.constexpr
):
    """(tiles that a query of at most QUERIES tokens sees, the first of them); 0 tiles for other queries. Scalars or
    vectors."""
    first = kv_len * 0
    if WINDOW > 0:
        if QUERIES == 1:
            first = first_seen(kv_len - 1, WINDOW, CHUNKED) // TILE
        else:
            first = first_seen(kv_len - query_len, WINDOW, CHUNKED) // TILE
    return tl.where(is_served(query_len, QUERIES), (kv_len + TILE - 1) // TILE - first, 0), first


@triton.jit
def cut(query_len, tiles, longest, QUERIES: tl.constexpr):
    """(parts, tiles of each) of about equal length, at most `longest`, instead of long ones and a rest.

    A query without keys (a row that pads a captured batch) has one part of no tiles.
    """
    parts = tl.maximum((tiles + longest - 1) // longest, 1)
    part_tiles = tl.maximum((tiles + parts - 1) // parts, 1)
    parts = tl.maximum((tiles + part_tiles - 1) // part_tiles, 1)
    return tl.where(is_served(query_len, QUERIES), parts, 0), part_tiles


@triton.jit
def lengths(query_start, seq_lens, start, num_seqs, SEQS: tl.constexpr):
    """(rows, query lengths, KV lengths), each [SEQS] int32, of the sequences from `start` on; 0 past the last."""
    rows = start + tl.arange(0, SEQS)
    live = rows < num_seqs
    ends = tl.load(query_start + rows + 1, mask=live, other=0)
    query_lens = ends - tl.load(query_start + rows, mask=live, other=0)
    return rows, query_lens, tl.load(seq_lens + rows, mask=live, other=0)


@triton.jit
def is_uneven(query_start, seq_lens, num_seqs, total, longest,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, QUERIES: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Whether parts of at most `longest` tiles differ so much that all have less than 5/6 of as many of the longest."""
    num_parts, most = num_seqs * 0, num_seqs * 0
    for start in range(0, num_seqs, SEQS):
        _, query_lens, kv_lens = lengths(query_start, seq_lens, start, num_seqs, SEQS)
        tiles, _ = tiles_seen(query_lens, kv_lens, TILE, WINDOW, CHUNKED, QUERIES)
        parts, part_tiles = cut(query_lens, tiles, longest, QUERIES)
        num_parts += tl.sum(parts, 0)
        most = tl.maximum(most, tl.max(tl.where(tiles > 0, part_tiles, 0), 0))
    return most.to(tl.int64) * num_parts * 5 > total.to(tl.int64) * 6


@triton.jit(
    do_not_specialize=[
        "query_start", "seq_lens", "items", "num_seqs", "num_items", "num_uneven_items", "num_slots"
    ]
)  # fmt: skip
def plan_decode_items(
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    items,  # [num_slots, WIDTH] int32, filled
    num_seqs,
    num_items,  # parts to aim at, beyond one for each sequence
    num_uneven_items,  # likewise where these would be uneven
    num_slots,  # at least as many as there are parts
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 where there is none
    CHUNKED: tl.constexpr,
    QUERIES: tl.constexpr,  # most tokens of a query that is served
    SEQS: tl.constexpr,  # sequences read at once
    ITEMS: tl.constexpr,  # items written at once
):
    """Grid (num_seqs,): the items of one sequence, behind those of the sequences before it."""
    seq = tl.program_id(0)
    total = num_seqs * 0
    for start in range(0, num_seqs, SEQS):
        _, query_lens, kv_lens = lengths(query_start, seq_lens, start, num_seqs, SEQS)
        tiles, _ = tiles_seen(query_lens, kv_lens, TILE, WINDOW, CHUNKED, QUERIES)
        total += tl.sum(tiles, 0)
    longest = tl.maximum((total + num_items - 1) // num_items, MIN_TILES)
    if num_uneven_items != num_items:  # noqa: SIM102  # `and` would work out both
        if is_uneven(query_start, seq_lens, num_seqs, total, longest, TILE, WINDOW, CHUNKED, QUERIES, SEQS):
            longest = tl.maximum((total + num_uneven_items - 1) // num_uneven_items, MIN_TILES)
    first_slot = num_seqs * 0
    for start in range(0, seq, SEQS):
        rows, query_lens, kv_lens = lengths(query_start, seq_lens, start, num_seqs, SEQS)
        tiles, _ = tiles_seen(query_lens, kv_lens, TILE, WINDOW, CHUNKED, QUERIES)
        parts, _ = cut(query_lens, tiles, longest, QUERIES)
        first_slot += tl.sum(tl.where(rows < seq, parts, 0), 0)

    token = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - token
    kv_len = tl.load(seq_lens + seq)
    tiles, first = tiles_seen(query_len, kv_len, TILE, WINDOW, CHUNKED, QUERIES)
    num_parts, part_tiles = cut(query_len, tiles, longest, QUERIES)
    for start in range(0, num_parts, ITEMS):
        part = start + tl.arange(0, ITEMS)
        real = part < num_parts
        item = items + (first_slot + part) * WIDTH
        begin = first + part * part_tiles
        tl.store(item + SEQ, seq, mask=real)
        tl.store(item + TOKEN, token, mask=real)
        tl.store(item + KV_LEN, kv_len, mask=real)
        tl.store(item + BEGIN, begin, mask=real)
        tl.store(item + END, tl.minimum(begin + part_tiles, first + tiles), mask=real)
        tl.store(item + NUM_PARTS, num_parts, mask=real)
        tl.store(item + FIRST_SLOT, first_slot, mask=real)
        if QUERIES > 1:
            tl.store(item + QUERY_LEN, query_len, mask=real)
    if seq == num_seqs - 1:
        for start in range(first_slot + num_parts, num_slots, ITEMS):
            slot = start + tl.arange(0, ITEMS)
            tl.store(items + slot * WIDTH + SEQ, -1, mask=slot < num_slots)
