"""The causal convolution before the gated delta rule in Triton: of a prompt, with its last inputs, which a state keeps.

All is in fp32, and every sum has one order.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.delta.parts_jit import FILLED, LAST, activated, has_state, sequence_bounds, tail_places


@triton.jit(do_not_specialize=["number", "first_seq", "query_start"])
def convolve_tokens(
    projected,
    stride,
    conv,  # [KERNEL, MIXED] fp32
    words,
    states,
    num_states,
    number,
    query_start,  # [num_seqs + 1] int32
    first_seq,
    active,  # [num_tokens, MIXED]
    MIXED: tl.constexpr,
    KERNEL: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    MATRIX: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (ceil(most tokens / TOKENS), ceil(MIXED / TILE), num_seqs): some channels of some tokens of a sequence."""
    seq = first_seq + tl.program_id(2)
    begin = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - begin
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < count:
        channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
        real = (tokens < count)[:, None] & (channels < MIXED)[None, :]
        if MIXED % TILE != 0:
            channels = tl.minimum(channels, MIXED - 1)
        ids = states + seq.to(tl.int64) * 3 * num_states
        dtype = projected.dtype.element_ty
        total = tl.zeros([TOKENS, TILE], tl.float32)
        for tap in tl.static_range(KERNEL):
            places = tokens + tap - (KERNEL - 1)
            rows = projected + (begin + tl.maximum(places, 0)).to(tl.int64)[:, None] * stride + channels[None, :]
            inputs = tl.load(rows, mask=real & (places >= 0)[:, None], other=0.0).to(tl.float32)
            if tl.program_id(0) * TOKENS < KERNEL - 1:
                taps = (places + KERNEL - 1)[:, None]
                earlier = tail_places(
                    ids, number, channels[None, :], taps, MIXED, KEY_SIZE, KERNEL, MATRIX, WORDS, PARTS, RUN
                )
                is_there = real & (places < 0)[:, None] & has_state(ids)[:, None]
                inputs += tl.load(words + earlier, mask=is_there, other=0.0)
            total += inputs * tl.load(conv + tap * MIXED + channels)[None, :]
        rows = active + (begin + tokens).to(tl.int64)[:, None] * MIXED + channels[None, :]
        tl.store(rows, activated(total, dtype), mask=real)


@triton.jit
def tail_at(
    end,  # of a sequence's tokens, the first ones
    projected,
    stride,
    begin,
    words,
    ids,
    number,
    channels,
    real,
    MIXED: tl.constexpr,
    KERNEL: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    MATRIX: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    TAPS: tl.constexpr,
):
    """[channels, TAPS] fp32: the convolution's last inputs up to a token, those before the step among them."""
    taps = tl.arange(0, TAPS)
    places = end - (KERNEL - 1) + taps
    rows = projected + (begin + tl.maximum(places, 0)).to(tl.int64)[None, :] * stride + channels[:, None]
    is_new = real[:, None] & ((places >= 0) & (taps < KERNEL - 1))[None, :]
    is_old = real[:, None] & (places < 0)[None, :] & has_state(ids)[:, None]
    earlier = tail_places(
        ids,
        number,
        channels[:, None],
        (places + KERNEL - 1)[None, :],
        MIXED,
        KEY_SIZE,
        KERNEL,
        MATRIX,
        WORDS,
        PARTS,
        RUN,
    )
    inputs = tl.load(rows, mask=is_new, other=0.0).to(tl.float32)
    return inputs + tl.load(words + earlier, mask=is_old, other=0.0)


@triton.jit(do_not_specialize=["number", "first_seq", "query_start", "seq_lens"])
def keep_tails(
    projected,
    stride,
    words,
    states,
    num_states,
    number,
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    first_seq,
    MIXED: tl.constexpr,
    KERNEL: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    MATRIX: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (ceil(MIXED / TILE), num_seqs): the convolution's last inputs of some channels, where a state is kept."""
    seq = first_seq + tl.program_id(1)
    ids = states + seq.to(tl.int64) * 3 * num_states
    begin, count, filled = sequence_bounds(query_start, seq_lens, ids, num_states, seq, BLOCK_SIZE)
    channels = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = channels < MIXED
    if MIXED % TILE != 0:
        channels = tl.minimum(channels, MIXED - 1)
    at_filled = tail_at(
        filled, projected, stride, begin, words, ids, number, channels, real,
        MIXED, KERNEL, KEY_SIZE, MATRIX, WORDS, PARTS, RUN, TAPS,
    )  # fmt: skip
    at_end = tail_at(
        count, projected, stride, begin, words, ids, number, channels, real,
        MIXED, KERNEL, KEY_SIZE, MATRIX, WORDS, PARTS, RUN, TAPS,
    )  # fmt: skip
    taps = tl.arange(0, TAPS)[None, :]
    both = real[:, None] & (taps < KERNEL - 1)
    tl.debug_barrier()  # they may be written where another thread reads
    places = tail_places(
        ids + LAST * num_states, number, channels[:, None], taps, MIXED, KEY_SIZE, KERNEL, MATRIX, WORDS, PARTS, RUN
    )
    tl.store(words + places, at_end, mask=both)
    if filled < count:
        places = tail_places(
            ids + FILLED * num_states,
            number,
            channels[:, None],
            taps,
            MIXED,
            KEY_SIZE,
            KERNEL,
            MATRIX,
            WORDS,
            PARTS,
            RUN,
        )
        tl.store(words + places, at_filled, mask=both)
