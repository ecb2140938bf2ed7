"""Penalties over rows of logits, and what they follow from, in Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "repetitions", "presences", "frequencies", "vocab_size", "num_words"])
def penalize_rows(
    logits,  # [num_rows, vocab_size] fp32
    seen,  # [num_slots, num_words] int32
    counts,  # [num_slots, vocab_size] int32
    slots,  # [num_rows] int64
    repetitions,  # [num_rows] fp32
    presences,  # [num_rows] fp32
    frequencies,  # [num_rows] fp32
    vocab_size,
    num_words,
    TILE: tl.constexpr,
):
    """Grid (vocab_size / TILE, num_rows): TILE tokens of one row. Of tokens that were not seen a bit each is read."""
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    words = tl.load(seen + slot * num_words + tokens // 32, mask=tokens < vocab_size, other=0)
    was_seen = ((words >> (tokens % 32)) & 1) == 1
    places = logits + row.to(tl.int64) * vocab_size + tokens
    values = tl.load(places, mask=was_seen, other=0.0)
    count = tl.load(counts + slot * vocab_size + tokens, mask=was_seen, other=0)
    repetition = tl.load(repetitions + row)
    repeated = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
    lowered = tl.load(presences + row) + tl.load(frequencies + row) * count.to(tl.float32)
    tl.store(places, tl.where(count > 0, repeated - lowered, repeated), mask=was_seen)


@triton.jit(do_not_specialize=["vocab_size", "num_words"])
def count_chosen(
    seen,  # [num_slots, num_words] int32
    counts,  # [num_slots, vocab_size] int32
    slots,  # [num_rows] int64
    tokens,  # [num_rows] int64
    vocab_size,
    num_words,
):
    """Grid (num_rows,): one token of one sequence, which no other program writes to."""
    row = tl.program_id(0)
    slot, token = tl.load(slots + row), tl.load(tokens + row)
    if (slot >= 0) & (token >= 0):
        word = seen + slot * num_words + token // 32
        bit = (token % 32).to(tl.int32)
        before = tl.load(word)
        place = counts + slot * vocab_size + token
        count = tl.load(place)
        tl.store(place, tl.where(((before >> bit) & 1) == 1, count + 1, 1))
        tl.store(word, before | (tl.full([], 1, tl.int32) << bit))
