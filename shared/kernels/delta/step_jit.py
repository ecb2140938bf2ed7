"""A step of one token of the gated delta rule in Triton: states are updated where they lie in the pool.

The first sequences of a step, of one token each, take `convolve_ones` and `step_heads`. All is in fp32, and every sum
has one order.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.delta.parts_jit import (
    LAST,
    NORM_EPS,
    activated,
    gated_normed,
    has_state,
    load_log_decays,
    load_rates,
    matrix_places,
    tail_places,
)
from shared.kernels.rounding_jit import rounded


@triton.jit(do_not_specialize=["number"])
def convolve_ones(
    projected,  # [num_tokens, …], the first columns are the channels
    stride,  # elements from token to token
    conv,  # [KERNEL, MIXED] fp32
    words,  # the pool, fp32
    states,  # [num_seqs, 3, num_states] int32
    num_states,
    number,
    active,  # [num_tokens, MIXED]
    MIXED: tl.constexpr,
    KERNEL: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    MATRIX: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_ones, ceil(MIXED / TILE)): some channels of one sequence's one token; the newest inputs are kept."""
    seq = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = channels < MIXED
    if MIXED % TILE != 0:
        channels = tl.minimum(channels, MIXED - 1)
    newest = tl.load(projected + seq * stride + channels, mask=real, other=0.0)
    wide = newest.to(tl.float32)
    dtype = newest.dtype
    ids = states + seq * 3 * num_states
    total = tl.zeros([TILE], tl.float32)
    if KERNEL > 1:
        is_there = has_state(ids)
        for tap in tl.static_range(KERNEL - 1):
            places = tail_places(ids, number, channels, tap, MIXED, KEY_SIZE, KERNEL, MATRIX, WORDS, PARTS, RUN)
            total += tl.load(words + places, mask=real & is_there, other=0.0) * tl.load(conv + tap * MIXED + channels)
        taps = tl.arange(0, TAPS)[None, :]
        places = tail_places(
            ids, number, channels[:, None], taps + 1, MIXED, KEY_SIZE, KERNEL, MATRIX, WORDS, PARTS, RUN
        )
        later = tl.load(words + places, mask=real[:, None] & (taps < KERNEL - 2) & is_there[:, None], other=0.0)
        later = tl.where(taps == KERNEL - 2, wide[:, None], later)
        places = tail_places(
            ids + LAST * num_states, number, channels[:, None], taps, MIXED, KEY_SIZE, KERNEL, MATRIX, WORDS, PARTS, RUN
        )
        tl.debug_barrier()  # they may be written where another thread reads
        tl.store(words + places, later, mask=real[:, None] & (taps < KERNEL - 1))
    total += wide * tl.load(conv + (KERNEL - 1) * MIXED + channels)
    tl.store(active + seq * MIXED + channels, activated(total, dtype), mask=real)


@triton.jit(do_not_specialize=["number"])
def step_heads(
    projected,  # [num_tokens, …]
    stride,
    active,  # [num_tokens, MIXED]
    decay,  # [NUM_HEADS] fp32
    decay_bias,  # [NUM_HEADS] fp32, or by channel [NUM_HEADS, KEY_DIM]
    norm,  # [VALUE_DIM]
    words,
    states,  # [num_seqs, 3, num_states] int32
    num_states,
    number,
    output,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    STATE: tl.constexpr,  # numbers of a part of a layer's state
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_WHOLE_ROWS: tl.constexpr,
    IS_NORMED: tl.constexpr,  # whether a program has all columns, and norms them
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (num_ones, NUM_HEADS, ceil(VALUE_DIM / COLUMNS)): some columns of a head's matrix, updated by one token."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real, is_row = columns < VALUE_DIM, rows < KEY_DIM
    both = is_row[:, None] & real[None, :]
    mixed: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    ids = states + seq * 3 * num_states
    places = matrix_places(
        ids, number, head, rows, columns, NUM_HEADS, KEY_DIM, VALUE_DIM, STATE, WORDS, PARTS, RUN, HAS_WHOLE_ROWS
    )
    state = tl.load(words + places, mask=both & has_state(ids)[:, None], other=0.0)
    token = active + seq * mixed + key_head * KEY_DIM
    query = tl.load(token + rows, mask=is_row, other=0.0).to(tl.float32)
    key = tl.load(token + NUM_KEY_HEADS * KEY_DIM + rows, mask=is_row, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS) * (KEY_DIM**-0.5)
    key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
    values = active + seq * mixed + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM
    value = tl.load(values + columns, mask=real, other=0.0).to(tl.float32)
    rates = projected + seq * stride + mixed + NUM_HEADS * VALUE_DIM
    rate, of_head = load_rates(rates + head, 0, True), tl.load(decay + head)
    if BY_CHANNEL:
        bias = tl.load(decay_bias + head * KEY_DIM + rows, mask=is_row, other=0.0)
        faded = tl.exp(load_log_decays(rates + NUM_HEADS + head * KEY_DIM, rows, is_row, of_head, bias))
        state *= faded[:, None]
    else:
        bias = tl.load(decay_bias + head)
        state *= tl.exp(load_log_decays(rates + NUM_HEADS + head, 0, True, of_head, bias))
    update = (value - tl.sum(key[:, None] * state, 0)) * rate
    state += key[:, None] * update[None, :]
    last = ids + LAST * num_states
    places = matrix_places(
        last, number, head, rows, columns, NUM_HEADS, KEY_DIM, VALUE_DIM, STATE, WORDS, PARTS, RUN, HAS_WHOLE_ROWS
    )
    found = tl.sum(query[:, None] * state, 0)
    tl.store(words + places, state, mask=both)
    dtype = output.dtype.element_ty
    if IS_NORMED:
        gate = tl.load(projected + seq * stride + mixed + head * VALUE_DIM + columns, mask=real, other=0.0)
        weight = tl.load(norm + columns, mask=real, other=0.0).to(tl.float32)
        found = rounded(found, dtype)
        found = gated_normed(
            found, tl.sum(found * found, 0), weight, gate.to(tl.float32), eps, VALUE_DIM, dtype, BY_CHANNEL
        )
    tl.store(output + (seq * NUM_HEADS + head) * VALUE_DIM + columns, found.to(dtype), mask=real)
