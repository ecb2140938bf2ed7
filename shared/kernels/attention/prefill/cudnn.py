"""Long chunks by cuDNN's attention, which comes with torch.

On compute capability 9.0 it reaches 78 % of a product's rate where the kernel for any chunk reaches 57 %. It takes
whole tensors of shapes that it has made a plan for (some 50 ms each, kept by thread): keys and values are gathered from
the pool, and a chunk is cut into few shapes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.attention.prefill.cudnn_jit import gather_rows, join_part
from shared.kernels.attention.prefill.cuts import UNIT, ChunkCut, cut_chunk, shapes_until
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import next_power_of_2
from shared.kernels.pool_view import PoolView

HEAD_DIMS = (64, 128)
ROW_TILE, HEAD_TILE = 64, 16

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""(query [1, num_heads, rows, head_dim], key and value [1, num_kv_heads, keys, head_dim], scale, causal) to the output,
[1, num_heads, rows, head_dim] whose rows lie as the query's, and the sums' logarithms, [1, num_heads, rows, 1]."""
_prepared = threading.local()


def serves(query: Tensor, pool: PoolView) -> bool:
    """Whether chunks without window, sinks or bounded scores may be computed here."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and pool.dtype == query.dtype
        and query.shape[-1] in HEAD_DIMS
        and devices.device_limits(query.device).arch == "sm_90"
        and bool(torch.backends.cudnn.is_available())  # type: ignore[no-untyped-call]
    )


def long_attention(
    query: Tensor,
    pool: PoolView,
    layer: int,
    batch: AttentionBatch,
    index: int,
    output: Tensor,
    *,
    scale: float,
    unit: int = UNIT,
    attend: Attend | None = None,
) -> None:
    """Fill the rows of `output` of the sequence `index` of the step.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous, of the whole step.
        pool: of two planes, whole, of query's dtype.
        layer: 0 <= layer < num_layers.
        batch: the step's sequences.
        index: 0 <= index < batch.num_seqs.
        output: [num_tokens, num_heads, head_dim], contiguous, query's dtype.
        scale: factor on query · key, above 0.
        unit: as for `cut_chunk`.
        attend: another attention over whole tensors than cuDNN's.
    """
    query_len, kv_len = batch.query_lens[index], batch.kv_lens[index]
    cut = batch.remember(("long chunk", index, unit), lambda: cut_chunk(query_len, kv_len, unit))
    begin = sum(batch.query_lens[:index])
    table = batch.block_tables[index]
    if attend is None:
        attend = _cudnn
        _prepare(query, pool.num_kv_heads, cut, scale)
    rows, into = query[begin : begin + query_len], output[begin : begin + query_len]
    padded = _padded(rows, cut)
    context = kv_len - query_len
    keys, values = _gathered(pool, layer, table, context - cut.lead, kv_len, cut.square)
    sums = torch.empty(query.shape[1], query_len, dtype=torch.float32, device=query.device)
    found, totals = attend(_as_heads(padded), keys, values, scale, True)
    _join(into, sums, found, totals, 0, cut.lead, is_first=True)
    for part in cut.rectangles:
        keys, values = _gathered(pool, layer, table, part.first_key, context, part.keys)
        first = cut.lead + part.first_row
        some = padded[first : first + part.rows]
        if some.shape[0] < part.rows:  # the square ends before: its lead and the chunk fill fewer units than this
            some = torch.cat((some, some.new_zeros(part.rows - some.shape[0], *some.shape[1:])))
        found, totals = attend(_as_heads(some), keys, values, scale, False)
        _join(into, sums, found, totals, part.first_row, 0, is_first=False)


def _padded(rows: Tensor, cut: ChunkCut) -> Tensor:
    """[square, num_heads, head_dim]: a chunk's queries behind its lead's, which are zeros as those past its end are."""
    if rows.shape[0] == cut.square:
        return rows
    padded = rows.new_zeros(cut.square, *rows.shape[1:])
    padded[cut.lead : cut.lead + rows.shape[0]] = rows
    return padded


def _as_heads(rows: Tensor) -> Tensor:
    """[rows, num_heads, head_dim] as [1, num_heads, rows, head_dim], with strides that follow from the shape alone: a
    plan is kept by both."""
    count, num_heads, head_dim = rows.shape
    strides = (rows.numel(), head_dim, num_heads * head_dim, 1)
    return rows.as_strided((1, num_heads, count, head_dim), strides)


def _gathered(pool: PoolView, layer: int, table: Tensor, first: int, end: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values of `count` positions from `first`, [1, num_kv_heads, count, head_dim] each; zeros from `end`."""
    elements = pool.elements
    rows = elements.new_empty(2, 1, pool.num_kv_heads, count, pool.head_dim)
    tile = math.gcd(ROW_TILE, count)
    gather_rows[(2 * pool.num_kv_heads, count // tile)](
        elements, table, rows, layer, elements.stride(0), first, end,
        HEADS=pool.num_kv_heads, BLOCK_SIZE=pool.block_size, HEAD_DIM=pool.head_dim,
        DIMS=next_power_of_2(pool.head_dim), TILE=tile, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return rows[0], rows[1]


def _join(
    output: Tensor, sums: Tensor, part: Tensor, totals: Tensor, first_row: int, part_first: int, *, is_first: bool
) -> None:
    """Adds a part's rows from `part_first` on to those of `output` from `first_row` on, as far as both reach."""
    num_tokens, num_heads, head_dim = output.shape
    count = part.shape[2]
    assert part.stride()[1:] == (head_dim, num_heads * head_dim, 1)
    num_rows = min(num_tokens - first_row, count - part_first)
    tile = min(HEAD_TILE, next_power_of_2(num_heads))
    join_part[(num_rows, -(-num_heads // tile))](
        output, sums, part, totals.contiguous(), first_row, part_first, num_tokens, count,
        IS_FIRST=is_first, HEADS=num_heads, HEAD_DIM=head_dim, HEAD_TILE=tile, DIMS=next_power_of_2(head_dim),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention  # the public call gives no sums
    output, totals, *_ = attention(query, key, value, None, True, 0.0, is_causal, False, scale=scale)
    return output, totals


def _prepare(query: Tensor, num_kv_heads: int, cut: ChunkCut, scale: float) -> None:
    """Has this thread's plans made for all chunks up to this one, once: the largest step comes first, at the start."""
    _, num_heads, head_dim = query.shape
    kind: Hashable = (num_heads, num_kv_heads, head_dim, query.dtype, scale)
    known: dict[Hashable, int] = _prepared.__dict__.setdefault("squares", {})
    if known.get(kind, 0) >= cut.square:
        return
    known[kind] = cut.square
    squares, rectangles = shapes_until(cut.square)
    for rows, keys, is_causal in [(n, n, True) for n in squares] + [(*sides, False) for sides in rectangles]:
        some = _as_heads(query.new_zeros(rows, num_heads, head_dim))
        pair = query.new_zeros(2, 1, num_kv_heads, keys, head_dim)
        _cudnn(some, pair[0], pair[1], scale, is_causal)
