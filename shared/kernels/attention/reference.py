"""Paged attention in plain torch: what the kernels are held against, and the CPU's fallback."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView

QUERY_TILE = 128  # query tokens of one prefill tile: bounds the mask, and skips the keys after the tile


def paged_attention(
    query: Tensor,
    pool: PoolView,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
) -> Tensor:
    """`DecoderOps.paged_attention`.

    Sequences with one query token run together, in groups of similar KV length; longer queries run one
    sequence at a time.
    """
    check_paged_attention(query, pool, layer, batch, window, softcap, sinks, part=True, is_chunked=is_chunked)
    scoring, view = Scoring(scale, softcap, sinks), View(window, is_chunked)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    start = 0
    for index, query_len in enumerate(batch.query_lens):
        if query_len > 1:
            rows = slice(start, start + query_len)
            output[rows] = _attend_chunk(query[rows], pool, layer, batch, index, scoring, view)
        start += query_len
    for group in decode_groups(batch, view):
        output[group.token_rows] = _attend_decodes(query[group.token_rows], pool, layer, group, scoring)
    return output.flatten(1)


@dataclass(frozen=True)
class View:
    """Which keys a query sees, of those up to itself."""

    window: int | None = None  # tokens, None for all
    is_chunked: bool = False  # whether `window` counts from multiples of it, not back from the query

    def first_seen(self, position: int) -> int:
        """The first position that a query sees."""
        if self.window is None:
            return 0
        return position - position % self.window if self.is_chunked else max(0, position - self.window + 1)


@dataclass(frozen=True, eq=False)
class Scoring:
    """How scores become weights, as for `DecoderOps.paged_attention`."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads] fp32

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """Each query's mean of the values, by the keys that it sees.

        Args:
            query: [num_seqs, num_kv_heads, group * num_tokens, head_dim], the group's heads one after the other.
            keys: [num_seqs, num_kv_heads, num_keys, head_dim].
            values: likewise.
            seen: [num_seqs or 1, 1, group * num_tokens or 1, num_keys] bool.

        Returns:
            As query.
        """
        if self.softcap is None and self.sinks is None:
            return functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=self.scale)
        scores = (query @ keys.transpose(-1, -2)).float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            by_head = self.sinks.view(1, keys.shape[1], -1, 1).expand(scores.shape[0], -1, -1, -1)
            repeats = scores.shape[2] // by_head.shape[2]
            scores = torch.cat((scores, by_head.repeat_interleave(repeats, dim=2)), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values


def _attend_decodes(
    query: Tensor,  # [num_seqs, num_heads, head_dim], one token of each sequence of the group
    pool: PoolView,
    layer: int,
    group: DecodeGroup,
    scoring: Scoring,
) -> Tensor:  # [num_seqs, num_heads, head_dim]
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = pool.num_kv_heads
    gathered = _gather(pool, layer, group.block_ids, query.dtype)
    for row, used_len in enumerate(group.used_lens):
        # A masked score is still added up, a masked weight still multiplied: stale NaN must not get there.
        gathered[:, row, :, used_len:] = 0
    keys, values = gathered  # [num_seqs, num_kv_heads, width * block_size, head_dim]
    folded = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = scoring.attend(folded, keys, values, group.visible[:, None, None, :])
    return attended.reshape(num_seqs, num_heads, head_dim)


def _attend_chunk(
    query: Tensor,  # [query_len, num_heads, head_dim], one sequence's tokens
    pool: PoolView,
    layer: int,
    batch: AttentionBatch,
    index: int,  # row of the batch
    scoring: Scoring,
    view: View,
) -> Tensor:  # [query_len, num_heads, head_dim]
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, kv_len = pool.num_kv_heads, batch.kv_lens[index]
    group = num_heads // num_kv_heads
    first, last = visible_blocks(kv_len - query_len, kv_len, batch.block_size, view)
    keys, values = _gather(pool, layer, batch.block_tables[index, first:last].long(), query.dtype)
    base = first * batch.block_size  # position of keys[:, 0]

    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for tile_start in range(0, query_len, QUERY_TILE):
        tile_end = min(tile_start + QUERY_TILE, query_len)
        tile_len = tile_end - tile_start
        begin = kv_len - query_len + tile_start  # position of the tile's first token
        end = begin + tile_len
        seen_from = view.first_seen(begin)
        seen = slice(seen_from - base, end - base)

        positions = torch.arange(begin, end, device=query.device)[:, None]
        key_positions = torch.arange(seen_from, end, device=query.device)[None, :]
        visible = key_positions <= positions
        if view.window is not None:
            begins = positions - (positions % view.window if view.is_chunked else view.window - 1)
            visible &= key_positions >= begins
        # The group joins the query length: K and V are read once for all query heads that share them.
        folded = query[tile_start:tile_end].view(tile_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        attended = scoring.attend(
            folded.reshape(1, num_kv_heads, group * tile_len, head_dim),
            keys[None, :, seen],
            values[None, :, seen],
            visible.expand(group, -1, -1).reshape(1, 1, group * tile_len, -1),
        )
        unfolded = attended.view(num_kv_heads, group, tile_len, head_dim).permute(2, 0, 1, 3)
        output[tile_start:tile_end] = unfolded.reshape(tile_len, num_heads, head_dim)
    return output


def _gather(pool: PoolView, layer: int, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy blocks of one layer: ids [..., n] int64 to [2, ..., num_kv_heads, n * block_size, head_dim] of `dtype`.
    Rows of one plane are both.

    The pool is seen as rows of one head's block, so that one row selection also brings them into the order
    that attention reads; any other order would cost a second copy.
    """
    memory = pool.memory
    _, num_layers, num_planes, num_kv_heads, head_bytes = memory.shape
    if not memory.is_contiguous():  # some heads or layers of a pool
        chosen = memory[:, layer][block_ids]  # [..., n, num_planes, num_kv_heads, head_bytes]
        planes = pool.open(chosen.movedim(-3, 0).transpose(-3, -2), dtype)
        return planes if num_planes == 2 else torch.cat((planes, planes))
    heads = torch.arange(num_kv_heads, device=memory.device)[:, None]  # [num_kv_heads, 1]
    layer_rows = num_planes * num_kv_heads
    key_rows = block_ids[..., None, :] * (num_layers * layer_rows) + (layer * layer_rows + heads)
    rows = torch.stack((key_rows, key_rows + (num_planes - 1) * num_kv_heads))  # [2, ..., num_kv_heads, n]
    flat = memory.view(-1, head_bytes).index_select(0, rows.flatten())
    return pool.open(flat.view(*rows.shape, head_bytes), dtype)


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences with one query token each, of similar KV length, padded to the longest."""

    token_rows: Tensor  # [num_seqs] int64, rows of the step's tokens
    block_ids: Tensor  # [num_seqs, width] int64, a sequence's last block repeated as padding
    visible: Tensor  # [num_seqs, width * block_size] bool, slots that the query sees
    used_lens: tuple[int, ...]  # num_seqs, slots from the first gathered one on that have been written


def visible_blocks(first_query: int, kv_len: int, block_size: int, view: View) -> tuple[int, int]:
    """Range of table columns that the queries at positions `first_query .. kv_len - 1` can see."""
    return view.first_seen(first_query) // block_size, -(-kv_len // block_size)


def decode_groups(batch: AttentionBatch, view: View) -> list[DecodeGroup]:
    """The sequences whose query is one token, in groups in which padding at most doubles the keys read.

    Built once a batch for each `view`.
    """
    return batch.remember(("groups", view), lambda: _build(batch, view))


def _build(batch: AttentionBatch, view: View) -> list[DecodeGroup]:
    kv_lens, block_tables, block_size = batch.kv_lens, batch.block_tables, batch.block_size
    members: dict[int, list[int]] = defaultdict(list)
    starts: list[int] = []
    start = 0
    for index, (query_len, kv_len) in enumerate(zip(batch.query_lens, kv_lens, strict=True)):
        starts.append(start)
        start += query_len
        if query_len == 1:
            first, last = visible_blocks(kv_len - 1, kv_len, block_size, view)
            members[(last - first - 1).bit_length()].append(index)

    def build(indices: list[int]) -> DecodeGroup:
        device = block_tables.device
        lens = [kv_lens[index] for index in indices]
        ranges = [visible_blocks(kv_len - 1, kv_len, block_size, view) for kv_len in lens]
        width = max(last - first for first, last in ranges)
        columns = [[min(first + step, last - 1) for step in range(width)] for first, last in ranges]
        rows = torch.tensor(indices, device=device)[:, None]
        used_lens = [kv_len - first * block_size for kv_len, (first, _) in zip(lens, ranges, strict=True)]
        ends = torch.tensor(used_lens, device=device)[:, None]
        slots = torch.arange(width * block_size, device=device)
        seen_from = [
            view.first_seen(kv_len - 1) - first * block_size for kv_len, (first, _) in zip(lens, ranges, strict=True)
        ]
        visible = (slots < ends) & (slots >= torch.tensor(seen_from, device=device)[:, None])
        return DecodeGroup(
            token_rows=torch.tensor([starts[index] for index in indices], device=device),
            block_ids=block_tables[rows, torch.tensor(columns, device=device)].long(),
            visible=visible,
            used_lens=tuple(used_lens),
        )

    return [build(indices) for indices in members.values()]
