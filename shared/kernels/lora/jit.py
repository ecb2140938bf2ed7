"""Low-rank additions in Triton: a program takes a tile of one addition's rows, so others' weights are not read.

An addition is described by META numbers: the address of its a, its ranks, its parts, and of each part the address of b,
its first output, its outputs, its first rank and its rank.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["meta", "tiles", "order", "num_rows", "most_ranks"])
def shrink_tiles(
    x,  # [num_tokens, in_size]
    meta,  # [num_additions, META] int64
    tiles,  # [num_tiles, 3] int32: addition, its first row in the order, one behind the last
    order,  # [num_rows] int64: sorted row -> token
    sums,  # [SPLITS, num_rows, most_ranks] fp32
    in_size,
    num_rows,
    most_ranks,
    META: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (tiles, SPLITS, blocks of RANKS ranks): x a^T over the inputs of one split."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = meta + tl.load(tiles + tile * 3).to(tl.int64) * META
    count = tl.load(fields + 1).to(tl.int32)
    if block * RANKS >= count:
        return
    a = tl.load(fields).to(tl.pointer_type(x.dtype.element_ty))
    rows = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    real = rows < tl.load(tiles + tile * 3 + 2)
    tokens = tl.load(order + rows, mask=real, other=0)
    ranks = block * RANKS + tl.arange(0, RANKS)
    depths = tl.arange(0, DEPTH)
    found = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(split * DEPTH, in_size, SPLITS * DEPTH):
        k = start + depths
        inside = (k < in_size)[None, :]
        left = tl.load(x + tokens[:, None] * in_size + k[None, :], mask=real[:, None] & inside, other=0.0)
        place = a + ranks.to(tl.int64)[:, None] * in_size + k[None, :]
        right = tl.load(place, mask=(ranks < count)[:, None] & inside, other=0.0)
        found = tl.dot(left, tl.trans(right), found, input_precision="ieee")
    places = (split * num_rows + rows).to(tl.int64)[:, None] * most_ranks + ranks[None, :]
    tl.store(sums + places, found, mask=real[:, None] & (ranks < count)[None, :])


@triton.jit(do_not_specialize=["meta", "scales", "tiles", "order", "num_rows", "most_ranks"])
def expand_tiles(
    output,  # [num_tokens, out_size], what the projection gave
    meta,  # as above
    scales,  # [num_additions, most parts] fp32
    tiles,
    order,
    sums,
    out_size,
    num_rows,
    most_ranks,
    META: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tiles, tiles of COLUMNS outputs, most parts): adds scale (x a^T) b^T, the splits' sums in their order."""
    tile, part = tl.program_id(0), tl.program_id(2)
    addition = tl.load(tiles + tile * 3).to(tl.int64)
    fields = meta + addition * META
    if part >= tl.load(fields + 2):
        return
    own = fields + 3 + part * 5
    outputs = tl.load(own + 2).to(tl.int32)
    if tl.program_id(1) * COLUMNS >= outputs:
        return
    b = tl.load(own).to(tl.pointer_type(output.dtype.element_ty))
    begin, first, rank = tl.load(own + 1), tl.load(own + 3), tl.load(own + 4).to(tl.int32)
    rows = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    real = rows < tl.load(tiles + tile * 3 + 2)
    tokens = tl.load(order + rows, mask=real, other=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        inside = (ranks < rank)[None, :]
        shrunk = tl.zeros([ROWS, RANKS], tl.float32)
        for split in range(SPLITS):
            places = (split * num_rows + rows).to(tl.int64)[:, None] * most_ranks + (first + ranks)[None, :]
            shrunk += tl.load(sums + places, mask=real[:, None] & inside, other=0.0)
        place = b + columns.to(tl.int64)[:, None] * rank + ranks[None, :]
        weights = tl.load(place, mask=(columns < outputs)[:, None] & inside, other=0.0)
        found = tl.dot(shrunk, tl.trans(weights.to(tl.float32)), found, input_precision="ieee")
    scale = tl.load(scales + addition * tl.num_programs(2) + part)
    places = output + tokens[:, None] * out_size + (begin + columns)[None, :]
    mask = real[:, None] & (columns < outputs)[None, :]
    before = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, (before + found * scale).to(output.dtype.element_ty), mask=mask)
