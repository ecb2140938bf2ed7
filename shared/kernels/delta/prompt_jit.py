"""Prompts of the gated delta rule in Triton: states are read from a pool's blocks and written there.

Behind the convolution (`conv_jit.py`) a prompt is cut into chunks of CHUNK tokens, anew behind a token whose state is
kept: `solve_chunks` for all chunks at once, then `pass_chunks` from chunk to chunk; where channels have decays of their
own `fade_chunks` comes first. All is in fp32, and every sum has one order.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.delta.fade_jit import chunk_bounds, faded_products, load_since
from shared.kernels.delta.parts_jit import (
    FILLED,
    LAST,
    NORM_EPS,
    gated_normed,
    has_state,
    load_log_decays,
    load_rates,
    matrix_places,
    sequence_bounds,
)


@triton.jit
def join_inverses(inverses, system, SIZE: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of blocks of 4 * INNER on the diagonal of 1 + `system`, by those of the blocks of INNER.

    With M what these leave of the larger ones, whose fourth power is zero, the inverse of 1 + M is (1 - M)(1 + M²).
    """
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    is_new = (rows // (4 * INNER) == columns // (4 * INNER)) & (rows // INNER != columns // INNER)
    left = tl.where(is_new, system, 0.0)
    if INNER > 1:
        left = tl.dot(inverses, left, input_precision=PRECISION)
    squared = tl.dot(left, left, input_precision=PRECISION)
    if INNER > 1:
        squared = tl.dot(squared, inverses, input_precision=PRECISION)
    found = inverses + squared
    return found - tl.dot(left, found, input_precision=PRECISION)


@triton.jit
def unit_inverse(system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """[SIZE, SIZE] fp32: the inverse of 1 + `system`, which is below the diagonal: of 4, then of 16 rows, then of all.
    No row waits for another."""
    found = (tl.arange(0, SIZE)[:, None] == tl.arange(0, SIZE)[None, :]).to(tl.float32)
    found = join_inverses(found, system, SIZE, 1, PRECISION)
    found = join_inverses(found, system, SIZE, 4, PRECISION)
    if SIZE > 16:
        found = join_inverses(found, system, SIZE, 16, PRECISION)
    return found


@triton.jit
def load_keys(active, row, tokens, length, start, MIXED: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
    """[CHUNK, KEYS]: the keys or queries of a chunk's tokens, whose columns begin at `start`; zeros past both."""
    dims = tl.arange(0, KEYS)
    rows = active + (row + tokens).to(tl.int64)[:, None] * MIXED + start + dims[None, :]
    return tl.load(rows, mask=(tokens < length)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def unit_factors(x):
    """[rows] fp32: one over the length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)


@triton.jit(do_not_specialize=["first_seq", "query_start", "seq_lens", "first_row", "num_rows"])
def solve_chunks(
    projected,
    stride,
    active,  # [num_tokens, MIXED]
    decay,
    decay_bias,
    since,  # as `fade_chunks` left it, where it did
    states,
    num_states,
    query_start,
    seq_lens,
    first_seq,
    first_row,  # of the sequences' tokens, which the four below begin with
    own,  # [num_rows, NUM_HEADS, VALUE_DIM] fp32
    reads,  # [num_rows, NUM_HEADS, KEY_DIM] fp32
    within,  # [num_rows, NUM_HEADS, CHUNK] fp32
    factors,  # [3, num_rows, NUM_HEADS] fp32
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (most chunks of a sequence, NUM_HEADS, num_seqs): of a chunk's updates, which are `own` - `reads` @ state;
    its queries' weights on them, `within`; and `factors`: of each token's query to the state before the chunk, of its
    key to the state behind it, and of the one state to the other, the same for all tokens of a chunk. By channel these
    are without decays."""
    head, seq = tl.program_id(1), first_seq + tl.program_id(2)
    ids = states + seq.to(tl.int64) * 3 * num_states
    begin, count, filled = sequence_bounds(query_start, seq_lens, ids, num_states, seq, BLOCK_SIZE)
    first, length = chunk_bounds(tl.program_id(0), count, filled, CHUNK)
    if length > 0:
        mixed: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
        tokens, row = tl.arange(0, CHUNK), begin + first
        real = tokens < length
        of_head = (row - first_row + tokens).to(tl.int64) * NUM_HEADS + head
        rates = projected + row.to(tl.int64) * stride + mixed + NUM_HEADS * VALUE_DIM + head
        rate = load_rates(rates, tokens.to(tl.int64) * stride, real)
        at_head = head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM
        query = load_keys(active, row, tokens, length, at_head, mixed, KEY_DIM, KEYS)
        key = load_keys(active, row, tokens, length, NUM_KEY_HEADS * KEY_DIM + at_head, mixed, KEY_DIM, KEYS)
        # Lengths are divided by in products' results: of 16-bit factors these are exact.
        of_query, of_key = unit_factors(query) * (KEY_DIM**-0.5), unit_factors(key)
        plane = (tl.num_programs(1) * num_rows).to(tl.int64)
        earlier = tokens[:, None] > tokens[None, :]
        if BY_CHANNEL:
            tl.store(factors + of_head, of_query, mask=real)
            tl.store(factors + plane + of_head, of_key, mask=real)
            queries, seen = query.to(tl.float32), key.to(tl.float32)
            at_first = (row - first_row).to(tl.int64) * NUM_HEADS + head
            grown = load_since(since, at_first, tokens, length, NUM_HEADS, KEY_DIM, KEYS)
            scores, gram = faded_products(
                queries, seen, grown, since, at_first, length, NUM_HEADS, KEY_DIM, CHUNK, LEVELS, KEYS, PRECISION
            )
            scores += tl.where(tokens[:, None] == tokens[None, :], tl.sum(queries * seen, 1)[:, None], 0.0)
            seen *= tl.exp(grown)
            of_read = rate * of_key
        else:
            places = tokens.to(tl.int64) * stride
            log_decay = load_log_decays(
                rates + NUM_HEADS, places, real, tl.load(decay + head), tl.load(decay_bias + head)
            )
            decays, whole = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
            later = tokens[:, None] < tokens[None, :]
            between = tl.exp(tl.where(later, -float("inf"), decays[:, None] - decays[None, :]))
            tl.store(factors + of_head, of_query * tl.exp(decays), mask=real)
            tl.store(factors + plane + of_head, of_key * tl.exp(whole - decays), mask=real)
            tl.store(factors + 2 * plane + of_head, tokens * 0.0 + tl.exp(whole), mask=real)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
            gram = tl.dot(key, tl.trans(key), input_precision=PRECISION) * between
            seen = key.to(tl.float32)
            of_read = rate * of_key * tl.exp(decays)
        tl.store(
            within + of_head[:, None] * CHUNK + tokens[None, :],
            scores * of_query[:, None] * of_key[None, :],
            mask=real[:, None],
        )
        system = tl.where(earlier, gram * of_key[None, :] * (rate * of_key)[:, None], 0.0)
        inverse = unit_inverse(system, CHUNK, PRECISION)
        dims = tl.arange(0, KEYS)
        tl.store(
            reads + of_head[:, None] * KEY_DIM + dims[None, :],
            tl.dot(inverse * of_read[None, :], seen, input_precision=PRECISION),
            mask=real[:, None] & (dims < KEY_DIM)[None, :],
        )
        values = active + (row + tokens).to(tl.int64)[:, None] * mixed + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM
        inverse *= rate[None, :]
        for start in range(0, VALUE_DIM, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            both = real[:, None] & (columns < VALUE_DIM)[None, :]
            value = tl.load(values + columns[None, :], mask=both, other=0.0).to(tl.float32)
            tl.store(
                own + of_head[:, None] * VALUE_DIM + columns[None, :],
                tl.dot(inverse, value, input_precision=PRECISION),
                mask=both,
            )


@triton.jit(do_not_specialize=["number", "first_seq", "query_start", "seq_lens", "first_row", "num_rows"])
def pass_chunks(
    active,  # [num_tokens, MIXED]
    since,  # as for `solve_chunks`
    words,
    states,
    num_states,
    number,
    query_start,
    seq_lens,
    first_seq,
    first_row,
    own,  # as `solve_chunks` left them
    reads,
    within,
    factors,
    num_rows,
    output,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    STATE: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_WHOLE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (ceil(VALUE_DIM / COLUMNS), NUM_HEADS, num_seqs): some columns of a head's matrix, passed from chunk to
    chunk of a sequence, and what its tokens read of them."""
    head, seq = tl.program_id(1), first_seq + tl.program_id(2)
    ids = states + seq.to(tl.int64) * 3 * num_states
    begin, count, filled = sequence_bounds(query_start, seq_lens, ids, num_states, seq, BLOCK_SIZE)
    rows, columns = tl.arange(0, KEYS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < VALUE_DIM
    both = (rows < KEY_DIM)[:, None] & real[None, :]
    places = matrix_places(
        ids, number, head, rows, columns, NUM_HEADS, KEY_DIM, VALUE_DIM, STATE, WORDS, PARTS, RUN, HAS_WHOLE_ROWS
    )
    state = tl.load(words + places, mask=both & has_state(ids)[:, None], other=0.0)
    mixed: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
    at_head = head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM
    tokens, dims = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    plane = (tl.num_programs(1) * num_rows).to(tl.int64)
    num_chunks = (filled + CHUNK - 1) // CHUNK + (count - filled + CHUNK - 1) // CHUNK
    for chunk in range(num_chunks):
        start, length = chunk_bounds(chunk, count, filled, CHUNK)
        row = begin + start
        is_token = tokens < length
        of_head = (row - first_row + tokens).to(tl.int64) * NUM_HEADS + head
        read = tl.load(
            reads + of_head[:, None] * KEY_DIM + dims[None, :],
            mask=is_token[:, None] & (dims < KEY_DIM)[None, :],
            other=0.0,
        )
        owned = own + of_head[:, None] * VALUE_DIM + columns[None, :]
        update = tl.load(owned, mask=is_token[:, None] & real[None, :], other=0.0)
        update -= tl.dot(read, state, input_precision=PRECISION)
        query = load_keys(active, row, tokens, length, at_head, mixed, KEY_DIM, KEYS).to(tl.float32)
        if BY_CHANNEL:
            at_first = (row - first_row).to(tl.int64) * NUM_HEADS + head
            grown = load_since(since, at_first, tokens, length, NUM_HEADS, KEY_DIM, KEYS)
            query *= tl.exp(grown)
        of_query = tl.load(factors + of_head, mask=is_token, other=0.0)
        found = tl.dot(query, state, input_precision=PRECISION) * of_query[:, None]
        weights = tl.load(within + of_head[:, None] * CHUNK + tokens[None, :], mask=is_token[:, None], other=0.0)
        found += tl.dot(weights, update, input_precision=PRECISION)
        outputs = output + ((row + tokens).to(tl.int64) * NUM_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
        tl.store(outputs, found.to(output.dtype.element_ty), mask=is_token[:, None] & real[None, :])
        key = load_keys(active, row, tokens, length, NUM_KEY_HEADS * KEY_DIM + at_head, mixed, KEY_DIM, KEYS)
        key = key.to(tl.float32)
        of_key = tl.load(factors + plane + of_head, mask=is_token, other=0.0)
        if BY_CHANNEL:
            last = since + (at_first + (length - 1).to(tl.int64) * NUM_HEADS) * KEY_DIM
            whole = tl.load(last + dims, mask=dims < KEY_DIM, other=0.0)
            key *= tl.exp(tl.minimum(whole[None, :] - grown, 0.0))
            state *= tl.exp(whole)[:, None]
        else:
            state *= tl.load(factors + 2 * plane + (row - first_row).to(tl.int64) * NUM_HEADS + head)
        state += tl.dot(tl.trans(key), update * of_key[:, None], input_precision=PRECISION)
        done = start + length
        if (done == filled) | (done == count):
            kept_in = ids + tl.where(done == count, LAST, FILLED) * num_states
            targets = matrix_places(
                kept_in,
                number,
                head,
                rows,
                columns,
                NUM_HEADS,
                KEY_DIM,
                VALUE_DIM,
                STATE,
                WORDS,
                PARTS,
                RUN,
                HAS_WHOLE_ROWS,
            )
            tl.store(words + targets, state, mask=both)


@triton.jit(do_not_specialize=["first_row"])
def norm_heads(
    projected,
    stride,
    norm,  # [VALUE_DIM]
    output,  # [num_tokens, NUM_HEADS, VALUE_DIM], changed in place
    first_row,
    eps,
    NUM_HEADS: tl.constexpr,
    MIXED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (num_rows, ceil(NUM_HEADS / HEADS)): heads of one token, normed and gated."""
    row, heads = (first_row + tl.program_id(0)).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, VALUES)
    real = (heads < NUM_HEADS)[:, None] & (columns < VALUE_DIM)[None, :]
    dtype = output.dtype.element_ty
    of_row = heads[:, None] * VALUE_DIM + columns[None, :]
    places = output + row * (NUM_HEADS * VALUE_DIM) + of_row
    x = tl.load(places, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(projected + row * stride + MIXED + of_row, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(norm + columns, mask=columns < VALUE_DIM, other=0.0).to(tl.float32)[None, :]
    squares = tl.sum(x * x, 1)[:, None]
    found = gated_normed(x, squares, weight, gate, eps, VALUE_DIM, dtype, BY_CHANNEL)
    tl.store(places, found.to(dtype), mask=real)
