"""What the kernels of states share: where a state lies in the pool's blocks, gates, norms."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.activation.jit import silu
from shared.kernels.rounding_jit import rounded

NORM_EPS = tl.constexpr(1e-6)
READ, FILLED, LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Places of `AttentionBatch.state_blocks`."""


@triton.jit
def word_places(ids, at, part, WORDS: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr):
    """Where numbers `at` of a part of a sequence's states lie in the pool, as `state_words` says: int64; `ids`:
    [num_states] its blocks, with WORDS numbers of each part in each, RUN of which lie behind each other."""
    groups = at // WORDS
    inside = at - groups * WORDS
    if PARTS > 1:
        inside += (inside // RUN * (PARTS - 1) + part) * RUN
    return tl.load(ids + groups).to(tl.int64) * (WORDS * PARTS) + inside


@triton.jit
def matrix_places(
    ids,
    number,  # of the layer
    head,
    rows,
    columns,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STATE: tl.constexpr,  # numbers of a part of a layer's state
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_WHOLE_ROWS: tl.constexpr,  # whether every row of a matrix lies in one run
):
    """[rows, columns] as `word_places`; those past the matrix's end are its last."""
    in_part: tl.constexpr = NUM_HEADS // PARTS
    part = head // in_part
    first = number * STATE + (head - part * in_part) * (KEY_DIM * VALUE_DIM)
    starts = first + tl.minimum(rows, KEY_DIM - 1) * VALUE_DIM
    if HAS_WHOLE_ROWS:
        return word_places(ids, starts, part, WORDS, PARTS, RUN)[:, None] + columns[None, :]
    places = starts[:, None] + tl.minimum(columns, VALUE_DIM - 1)[None, :]
    return word_places(ids, places, part, WORDS, PARTS, RUN)


@triton.jit
def tail_places(
    ids,
    number,  # of the layer
    channels,
    taps,
    MIXED: tl.constexpr,
    KEY_SIZE: tl.constexpr,  # of a token's keys
    KERNEL: tl.constexpr,
    MATRIX: tl.constexpr,  # numbers of a part's matrices
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
):
    """As `word_places`, of the convolution's inputs `taps` of `channels`; those of no tap are the last one's."""
    in_part: tl.constexpr = MIXED // PARTS
    first = number * (MATRIX + in_part * (KERNEL - 1)) + MATRIX
    part = channels * 0
    if PARTS > 1:  # queries, keys and values of a part lie behind each other
        keys: tl.constexpr = KEY_SIZE // PARTS
        values: tl.constexpr = in_part - 2 * keys
        kind = tl.minimum(channels // KEY_SIZE, 2)
        inside = channels - kind * KEY_SIZE
        part = tl.where(kind < 2, inside // keys, inside // values)
        channels = kind * keys + inside - part * tl.where(kind < 2, keys, values)
    return word_places(
        ids, first + tl.minimum(tl.maximum(taps, 0), KERNEL - 2) * in_part + channels, part, WORDS, PARTS, RUN
    )


@triton.jit
def has_state(ids):
    """[1] bool: whether there is a state before a sequence's tokens."""
    return tl.load(ids + tl.arange(0, 1)) >= 0


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact where it is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    s = e / (2.0 + e)  # log(1 + e) = 2 artanh(s)
    s2 = s * s
    small = 2.0 * s * (1.0 + s2 * (0.33333333333 + s2 * (0.2 + s2 * 0.14285714286)))
    return tl.where(x > 20.0, x, tl.where(e < 0.25, small, tl.log(1.0 + e)))


@triton.jit
def load_rates(rates, places, real):
    """Rates of one head for some tokens, fp32, zeros where there is nothing; `rates`: the head's."""
    raw = tl.load(rates + places, mask=real, other=0.0)
    return tl.where(real, rounded(1.0 / (1.0 + tl.exp(-raw.to(tl.float32))), raw.dtype), 0.0)


@triton.jit
def load_log_decays(decays, places, real, decay, bias):
    """Logarithms of one head's decays for some tokens, fp32, zeros where there is nothing; by channel `bias` is that of
    the channels."""
    raw = tl.load(decays + places, mask=real, other=0.0).to(tl.float32)
    return tl.where(real, decay * softplus(raw + bias), 0.0)


@triton.jit
def gated_normed(x, squares, weight, gate, eps, VALUE_DIM: tl.constexpr, dtype: tl.constexpr, IS_SIGMOID: tl.constexpr):
    """Heads' results, fp32 rounded to `dtype`, normed and gated as the reference rounds; fp32. `squares`: each head's
    sum of squares, as `x` but for the dimension of a head."""
    if IS_SIGMOID:
        return x * tl.rsqrt(squares / VALUE_DIM + eps) * weight / (1.0 + tl.exp(-gate))
    normed = rounded(x * tl.rsqrt(squares / VALUE_DIM + eps), dtype)
    return rounded(normed * weight, dtype) * silu(gate)


@triton.jit
def activated(x, dtype: tl.constexpr):
    """What the convolution gave, fp32, rounded before and behind its activation; of `dtype`."""
    return silu(rounded(x, dtype)).to(dtype)


@triton.jit
def sequence_bounds(query_start, seq_lens, ids, num_states, seq, BLOCK_SIZE: tl.constexpr):
    """(row of a sequence's first token in the step, its tokens, those up to where a state is kept before the end)."""
    begin = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - begin
    end = tl.load(seq_lens + seq)
    filled = end // BLOCK_SIZE * BLOCK_SIZE - (end - count)
    return begin, count, tl.where(tl.load(ids + FILLED * num_states) >= 0, filled, count)
