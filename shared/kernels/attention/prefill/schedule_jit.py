"""The schedule of a step's chunks, worked out on the device once for all layers."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

# Columns of a work item, int32.
SEQ = tl.constexpr(0)  # row of the block tables
TILE_INDEX = tl.constexpr(1)  # of the sequence's query tiles
FIRST_TOKEN = tl.constexpr(2)  # the sequence's first row of the query
QUERY_LEN = tl.constexpr(3)
KV_LEN = tl.constexpr(4)
WIDTH = tl.constexpr(8)


@triton.jit(do_not_specialize=["query_start", "seq_lens", "items", "num_tiles", "tile_tokens", "least", "most"])
def plan_prefill_items(
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    items,  # [num_tiles, WIDTH] int32, filled
    num_tiles,
    tile_tokens,  # query tokens of a tile
    least,  # query tokens that a sequence must have to be among them,
    most,  # and may have
    SEQS: tl.constexpr,  # sequences read at once
    ITEMS: tl.constexpr,  # items written at once
):
    """Grid (num_seqs,): the tiles of one sequence, if its query has `least` to `most` tokens.

    They are written from the end: the last tiles of a prompt see the most keys and start first.
    """
    seq = tl.program_id(0)
    place = num_tiles - 1
    for start in range(0, seq, SEQS):
        rows = start + tl.arange(0, SEQS)
        begins = tl.load(query_start + rows, mask=rows < seq, other=0)
        query_lens = tl.load(query_start + rows + 1, mask=rows < seq, other=0) - begins
        is_listed = (query_lens >= least) & (query_lens <= most)
        place -= tl.sum(tl.where(is_listed, (query_lens + tile_tokens - 1) // tile_tokens, 0), 0)
    first_token = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - first_token
    if query_len >= least and query_len <= most:
        kv_len = tl.load(seq_lens + seq)
        tiles = (query_len + tile_tokens - 1) // tile_tokens
        for start in range(0, tiles, ITEMS):
            tile = start + tl.arange(0, ITEMS)
            real = tile < tiles
            item = items + (place - tile) * WIDTH
            tl.store(item + SEQ, seq, mask=real)
            tl.store(item + TILE_INDEX, tile, mask=real)
            tl.store(item + FIRST_TOKEN, first_token, mask=real)
            tl.store(item + QUERY_LEN, query_len, mask=real)
            tl.store(item + KV_LEN, kv_len, mask=real)
