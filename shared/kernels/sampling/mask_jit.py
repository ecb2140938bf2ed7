"""The mask of a structured answer over its row of logits, in Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["vocab_size", "num_words"])
def mask_rows(
    logits,  # [num_rows, vocab_size] fp32
    masks,  # [num_masks, num_words] int32
    rows,  # [num_masks] int64
    vocab_size,
    num_words,
    TILE: tl.constexpr,
):
    """Grid (vocab_size / TILE, num_masks): TILE tokens of one row. Only what is not allowed is written."""
    mask = tl.program_id(1)
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = tokens < vocab_size
    words = tl.load(masks + mask.to(tl.int64) * num_words + tokens // 32, mask=inside, other=-1)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    row = tl.load(rows + mask)
    places = logits + row * vocab_size + tokens
    tl.store(places, tl.full([TILE], float("-inf"), tl.float32), mask=inside & forbidden)
