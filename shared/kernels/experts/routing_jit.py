"""The choice of experts in Triton: all of a token's rules in one program, with the definition's order of equal ones."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

PAST = tl.constexpr(2147483647)  # more than any index
NEVER = tl.constexpr(-2147483648)  # less than the key of any number
LOWEST = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def keys_of(values):
    """int32 in the order of fp32 values: both zeros are equal, and NaN is above all numbers."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values != values, PAST, bits ^ ((bits >> 31) & PAST))


@triton.jit
def sum_of_best(merits, keys, places, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """[GROUPS]: the sum of the COUNT best of each group's merits; all three [GROUPS, MEMBERS]."""
    total = tl.zeros([GROUPS], tl.float32)
    for _ in range(COUNT):
        peaks = tl.max(keys, 1)
        first = tl.min(tl.where(keys == peaks[:, None], places, PAST), 1)
        is_first = places == first[:, None]
        total += tl.sum(tl.where(is_first, merits, 0.0), 1)
        keys = tl.where(is_first, NEVER, keys)
    return total


@triton.jit(do_not_specialize=["token_stride"])
def choose_of_token(
    logits,  # [num_tokens, num_experts], strided
    bias,  # [num_experts] fp32 or None
    expert_ids,  # [num_tokens, TOP_K] int64
    weights,  # [num_tokens, TOP_K] fp32
    token_stride,
    scale,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,  # a power of two, at least TOP_K
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,  # likewise
    OF_GROUP: tl.constexpr,  # experts
    MEMBERS: tl.constexpr,  # likewise
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
):
    """Grid (num_tokens,): see `routing.choose_experts`, step by step."""
    token = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)
    real = (groups < NUM_GROUPS)[:, None] & (members < OF_GROUP)[None, :]
    ids = groups[:, None] * OF_GROUP + members[None, :]
    values = tl.load(logits + token * token_stride + ids, mask=real, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        powers = tl.where(real, tl.exp(values - tl.max(tl.max(values, 1), 0)), 0.0)
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    else:
        scores = tl.where(real, 1.0 / (1.0 + tl.exp(-values)), 0.0)
    has_groups: tl.constexpr = TOP_GROUPS < NUM_GROUPS
    merits = values
    if bias is not None:
        merits = scores + tl.load(bias + ids, mask=real, other=0.0)
    elif has_groups and GROUP_SCORE > 1:
        merits = scores
    keys = tl.where(real, keys_of(merits), NEVER)
    if has_groups:
        merits = tl.where(real, merits, 0.0)
        of_groups = keys_of(sum_of_best(merits, keys, ids, GROUPS, GROUP_SCORE))
        of_groups = tl.where(groups < NUM_GROUPS, of_groups, NEVER)
        is_open = groups < 0
        for _ in range(TOP_GROUPS):
            first = tl.min(tl.where(of_groups == tl.max(of_groups, 0), groups, PAST), 0)
            is_open = is_open | (groups == first)
            of_groups = tl.where(groups == first, NEVER, of_groups)
        keys = tl.where(real & (is_open == 0)[:, None], LOWEST, keys)

    places = tl.arange(0, CHOSEN)
    chosen = tl.zeros([CHOSEN], tl.int32)
    shares = tl.zeros([CHOSEN], tl.float32)
    for place in range(TOP_K):
        peak = tl.max(tl.max(keys, 1), 0)
        best = tl.min(tl.min(tl.where((keys == peak) & real, ids, PAST), 1), 0)
        share = tl.sum(tl.sum(tl.where(ids == best, tl.where(real, scores, 0.0), 0.0), 1), 0)
        chosen = tl.where(places == place, best, chosen)
        shares = tl.where(places == place, share, shares)
        keys = tl.where((ids == best) & real, NEVER, keys)
    if IS_NORMALISED:
        total = tl.sum(shares, 0)
        if not IS_SOFTMAX:
            total += 1e-20
        shares = shares / total
    kept = places < TOP_K
    tl.store(expert_ids + token * TOP_K + places, chosen.to(tl.int64), mask=kept)
    tl.store(weights + token * TOP_K + places, shares * scale, mask=kept)
