"""Prompts whose channels fade each by itself, in Triton: what a chunk's tokens have to do with each other.

Two tokens of a chunk are parted by a border between halves, of the chunk or of one of its halves, and so on: the decay
between them is that up to the border times that from there on, and neither is above 1.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.delta.parts_jit import load_log_decays, sequence_bounds


@triton.jit
def chunk_bounds(chunk, count, filled, CHUNK: tl.constexpr):
    """(the first of a sequence's tokens in a chunk, their number: 0 where there is none)."""
    before = (filled + CHUNK - 1) // CHUNK
    first = tl.where(chunk < before, chunk * CHUNK, filled + (chunk - before) * CHUNK)
    return first, tl.maximum(tl.minimum(tl.where(chunk < before, filled, count) - first, CHUNK), 0)


@triton.jit(do_not_specialize=["first_seq", "query_start", "seq_lens", "first_row"])
def fade_chunks(
    projected,
    stride,
    decay,
    decay_bias,  # [NUM_HEADS, KEY_DIM] fp32
    states,
    num_states,
    query_start,
    seq_lens,
    first_seq,
    first_row,  # of the sequences' tokens
    since,  # [num_rows, NUM_HEADS, KEY_DIM] fp32
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    MIXED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid (most chunks of a sequence, NUM_HEADS, num_seqs): logarithms of the channels' decays, of a chunk's begin up
    to each token."""
    head, seq = tl.program_id(1), first_seq + tl.program_id(2)
    ids = states + seq.to(tl.int64) * 3 * num_states
    begin, count, filled = sequence_bounds(query_start, seq_lens, ids, num_states, seq, BLOCK_SIZE)
    first, length = chunk_bounds(tl.program_id(0), count, filled, CHUNK)
    if length > 0:
        tokens, dims, row = tl.arange(0, CHUNK), tl.arange(0, KEYS), begin + first
        both = (tokens < length)[:, None] & (dims < KEY_DIM)[None, :]
        decays = projected + row.to(tl.int64) * stride + MIXED + NUM_HEADS * (VALUE_DIM + 1) + head * KEY_DIM
        bias = tl.load(decay_bias + head * KEY_DIM + dims, mask=dims < KEY_DIM, other=0.0)[None, :]
        places = tokens.to(tl.int64)[:, None] * stride + dims[None, :]
        found = tl.cumsum(load_log_decays(decays, places, both, tl.load(decay + head), bias), 0)
        of_head = (row - first_row + tokens).to(tl.int64) * NUM_HEADS + head
        tl.store(since + of_head[:, None] * KEY_DIM + dims[None, :], found, mask=both)


@triton.jit
def load_since(since, of_head, tokens, length, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """[tokens, KEYS]: what `fade_chunks` left for these tokens of a chunk, zeros past its end; `of_head`: its first
    token's number."""
    dims = tl.arange(0, KEYS)
    places = (of_head + tokens.to(tl.int64) * NUM_HEADS)[:, None] * KEY_DIM + dims[None, :]
    return tl.load(since + places, mask=(tokens < length)[:, None] & (dims < KEY_DIM)[None, :], other=0.0)


@triton.jit
def faded_products(
    query,  # [CHUNK, KEYS] fp32
    key,
    own,  # [CHUNK, KEYS]: `load_since` of the chunk
    since,
    of_head,
    length,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # 1 << LEVELS = CHUNK
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """([CHUNK, CHUNK] of queries, of keys): with the keys of earlier tokens, as these have faded since."""
    tokens = tl.arange(0, CHUNK)
    asked = tl.zeros([CHUNK, CHUNK], tl.float32)
    known = tl.zeros([CHUNK, CHUNK], tl.float32)
    for level in tl.static_range(LEVELS):
        size = CHUNK >> (level + 1)
        is_later = tokens // size % 2 == 1
        border = tl.minimum(tokens // (2 * size) * (2 * size) + size, length) - 1
        at = load_since(since, of_head, border, length, NUM_HEADS, KEY_DIM, KEYS)
        faded = tl.exp(tl.minimum(tl.where(is_later[:, None], own - at, at - own), 0.0))
        meets = (tokens // (2 * size))[:, None] == (tokens // (2 * size))[None, :]
        meets = meets & is_later[:, None] & (tokens // size % 2 == 0)[None, :]
        keys = key * faded
        asked += tl.where(meets, tl.dot(query * faded, tl.trans(keys), input_precision=PRECISION), 0.0)
        known += tl.where(meets, tl.dot(keys, tl.trans(keys), input_precision=PRECISION), 0.0)
    return asked, known
