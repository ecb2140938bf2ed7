"""Placing queries and writing latents in Triton: norm, both rotations and the pool's row in one launch."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.rmsnorm.jit import normalise
from shared.kernels.rotary.jit import rotate_halves


@triton.jit
def load_pairs(base, heads, num_heads, head_stride, pairs, ROPE: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """(first, second of each pair), both [HEADS, HALF] fp32, of some heads' rotated parts, which begin at `base`."""
    real = (heads < num_heads)[:, None] & (pairs < ROPE // 2)[None, :]
    start = base + heads[:, None] * head_stride
    if IS_INTERLEAVED:
        first, second = start + 2 * pairs[None, :], start + 2 * pairs[None, :] + 1
    else:
        first, second = start + pairs[None, :], start + pairs[None, :] + ROPE // 2
    return tl.load(first, mask=real, other=0.0).to(tl.float32), tl.load(second, mask=real, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["layer", "slots"])
def place_latents(
    query,  # [num_tokens, num_heads, NOPE + ROPE], strided
    latent,  # [num_tokens, RANK + ROPE], strided
    cos,  # [num_tokens, ROPE]
    sin,  # [num_tokens, ROPE]
    norm,  # [RANK]
    placed,  # [num_tokens, num_heads, NOPE + ROPE], contiguous
    pool,  # [num_blocks, num_layers, 1, 1, BLOCK_SIZE * (RANK + ROPE)]
    slots,  # [num_tokens] int64
    layer,
    num_heads,
    query_stride,  # elements from token to token
    query_head_stride,
    latent_stride,
    block_stride,
    eps,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    KEPT: tl.constexpr,  # a power of two, at least NOPE
    HALF: tl.constexpr,  # likewise, of ROPE // 2
    SIZE: tl.constexpr,  # likewise, of RANK
    IS_INTERLEAVED: tl.constexpr,
):
    """Grid (num_tokens, 1 + ceil(num_heads / HEADS)): the latent of one token, or some of its heads."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = placed.dtype.element_ty
    pairs = tl.arange(0, HALF)
    is_pair = pairs < ROPE // 2
    cosines = tl.load(cos + token * ROPE + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + token * ROPE + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    if part == 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            row = latent + token * latent_stride
            columns = tl.arange(0, SIZE)
            real = columns < RANK
            x = tl.load(row + columns, mask=real, other=0.0).to(tl.float32)[None, :]
            weight = tl.load(norm + columns, mask=real, other=0.0).to(tl.float32)
            normed = tl.sum(normalise(x, weight, RANK, eps, dtype), 0)
            start = slot // BLOCK_SIZE * block_stride + layer.to(tl.int64) * BLOCK_SIZE * (RANK + ROPE)
            target = pool + start + slot % BLOCK_SIZE * (RANK + ROPE)
            # As the definition: rounded first, then to what the pool keeps.
            tl.store(target + columns, normed.to(dtype).to(pool.dtype.element_ty), mask=real)
            only = tl.arange(0, 1)
            first, second = load_pairs(row + RANK, only, 1, 0, pairs, ROPE, IS_INTERLEAVED)
            first, second = rotate_halves(first, second, cosines, sines, dtype)
            to = target + RANK + only[:, None] + pairs[None, :]
            tl.store(to, first.to(dtype).to(pool.dtype.element_ty), mask=is_pair[None, :])
            tl.store(to + ROPE // 2, second.to(dtype).to(pool.dtype.element_ty), mask=is_pair[None, :])
    else:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        is_head = (heads < num_heads)[:, None]
        source = query + token * query_stride
        target = placed + (token * num_heads + heads)[:, None] * (NOPE + ROPE)
        kept = tl.arange(0, KEPT)
        mask = is_head & (kept < NOPE)[None, :]
        values = tl.load(source + heads[:, None] * query_head_stride + kept[None, :], mask=mask, other=0.0)
        tl.store(target + kept[None, :], values, mask=mask)
        first, second = load_pairs(source + NOPE, heads, num_heads, query_head_stride, pairs, ROPE, IS_INTERLEAVED)
        first, second = rotate_halves(first, second, cosines, sines, dtype)
        mask = is_head & is_pair[None, :]
        tl.store(target + NOPE + pairs[None, :], first.to(dtype), mask=mask)
        tl.store(target + NOPE + ROPE // 2 + pairs[None, :], second.to(dtype), mask=mask)
