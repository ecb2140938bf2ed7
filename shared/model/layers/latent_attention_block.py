"""The attention block of a layer whose cache keeps latents (multi-head latent attention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.backend import DecoderOps
from shared.kernels.batch import AttentionBatch
from shared.kernels.lora.step import Loras
from shared.kernels.pool_view import PoolView
from shared.model.config.latent_config import LatentConfig
from shared.model.config.model_config import ModelConfig
from shared.model.layers.modules import LayerModules

LATENT_EPS = 1e-6
"""Epsilon of the latents' norms, whatever the model's own."""
HEAD_DIM_STEP = 16
"""Expanded heads are padded to a multiple of it, to fit the kernels' vectors."""


class LatentAttentionBlock:
    """Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) over paged latents, in two ways that give the
    same.

    *Absorbed*: a query goes through its head's key projection into the latents' space, attends to the latents
    themselves, which are key and value at once, and what it finds goes through the head's value projection. A cached
    token is read once for all heads, so a token of an answer is computed so.

    *Expanded*: keys and values of all heads are computed from the latents of a sequence, then attended to as in any
    model. That costs a product for each cached token, and saves some for each pair of tokens, so long chunks are
    computed so.
    """

    def __init__(
        self, config: ModelConfig, layer: LayerModules, kernels: DecoderOps, place: tuple[int, int], number: int
    ) -> None:
        """Keeps references to its arguments; `place` is one of `layer_places`, `number` the layer's in blocks of all
        layers, from 0."""
        assert config.latent is not None
        assert layer.latent is not None
        assert layer.k_norm is not None
        self._sizes = config.latent
        self._num_heads = config.num_heads
        self._kernels = kernels
        self._group, self._row = place
        self._number = number
        self._layer = layer
        self._modules = layer.latent
        self._latent_norm = layer.k_norm
        self._least_expanded = least_expanded(config.latent)
        self._padded_dim = -(-max(config.latent.query_dim, config.latent.value_dim) // HEAD_DIM_STEP) * HEAD_DIM_STEP

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A token's shape of what `attend` reads, and of what it gives."""
        return (self._num_heads, self._sizes.query_dim), (self._num_heads * self._sizes.value_dim,)

    def place(
        self, x: Tensor, cos: Tensor, sin: Tensor, pool: PoolView, slots: Tensor, loras: Loras | None = None
    ) -> Tensor:
        """Write this step's latents into `pool` and return the query.

        Args:
            x: [num_tokens, hidden_size], normalised.
            cos: [1, num_tokens, rope_dim]; of zero angles where positions are not encoded.
            sin: [1, num_tokens, rope_dim].
            pool: of one plane with one head of kv_rank + rope_dim, changed in place.
            slots: [num_tokens] int64, or of KV groups [num_groups, num_tokens]: `AttentionBatch.group_slots`.
            loras: None: no adapter adds to projections of latents.

        Returns:
            [num_tokens, num_heads, nope_dim + rope_dim].
        """
        sizes, layer = self._sizes, self._layer
        query_size = layer.qkv.out_size - sizes.cached_dim
        assert loras is None, "no adapter adds to projections of latents"
        query, latent = torch.split(layer.qkv.forward(x), [query_size, sizes.cached_dim], dim=-1)
        if self._modules.q is not None:
            assert layer.q_norm is not None
            query = self._modules.q.forward(self._kernels.rms_norm(query.contiguous(), layer.q_norm, LATENT_EPS))
        return self._kernels.rotate_and_write_latent(
            query.view(-1, self._num_heads, sizes.query_dim),
            latent,
            cos[0],
            sin[0],
            pool,
            self._row if slots.dim() == 2 else self._number,
            slots[self._group] if slots.dim() == 2 else slots,
            norm=self._latent_norm,
            eps=LATENT_EPS,
            is_interleaved=sizes.is_interleaved,
        )

    def attend(self, query: Tensor, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """[num_tokens, num_heads, query_dim] to [num_tokens, num_heads * value_dim], over the latents that `place`
        wrote."""
        least, row = self._least_expanded, self._number
        if batch.groups:
            batch, row = batch.groups[self._group], self._row
        if least is None or max(batch.query_lens, default=0) < least:
            return self._absorbed(query, pool, row, batch)
        parts = batch.remember(("latent parts", least), lambda: split_by_length(batch, least))
        output = query.new_empty((query.shape[0], self._num_heads * self._sizes.value_dim))
        if parts.short is not None:
            output[parts.short_rows] = self._absorbed(query[parts.short_rows], pool, row, parts.short)
        for chunk in parts.long:
            output[chunk.rows] = self._expanded(query[chunk.rows], pool, row, chunk)
        return output

    def project(self, attended: Tensor, loras: Loras | None = None) -> Tensor:  # noqa: ARG002  # none adds here
        """[num_tokens, num_heads * value_dim] to [num_tokens, hidden_size]."""
        return self._layer.o.forward(attended)

    def _absorbed(self, query: Tensor, pool: PoolView, row: int, batch: AttentionBatch) -> Tensor:
        sizes, num_tokens = self._sizes, query.shape[0]
        wide = query.new_empty((num_tokens, self._num_heads, sizes.cached_dim))
        self._modules.to_latent.forward(query[..., : sizes.nope_dim], wide[..., : sizes.kv_rank])
        wide[..., sizes.kv_rank :] = query[..., sizes.nope_dim :]
        attended = self._kernels.paged_attention(wide, pool, row, batch, scale=sizes.scale, window=None)
        found = attended.view(num_tokens, self._num_heads, sizes.cached_dim)[..., : sizes.kv_rank]
        return self._modules.to_value.forward(found).flatten(1)

    def _expanded(self, query: Tensor, pool: PoolView, row: int, chunk: Chunk) -> Tensor:
        """A few heads at a time, in a pool made for them alone."""
        sizes, dim, table = self._sizes, self._padded_dim, chunk.table
        rows = pool.rows[table, row, 0, 0].flatten(0, 1).to(query.dtype)  # [num_slots, cached_dim]
        latents, keys = rows[:, : sizes.kv_rank].contiguous(), rows[:, None, sizes.kv_rank :]
        block_size = pool.block_size
        found, first = [], 0
        for expand in self._modules.expand:
            heads = expand.out_size // (sizes.nope_dim + sizes.value_dim)
            expanded = expand.forward(latents).view(-1, heads, sizes.nope_dim + sizes.value_dim)
            own = query.new_zeros((table.shape[0], 1, 2, heads, block_size, dim))
            by_token = own[:, 0].permute(1, 0, 3, 2, 4)  # [2, num_blocks, block_size, heads, dim], a view
            shape = (table.shape[0], block_size, heads)
            by_token[0, ..., : sizes.nope_dim] = expanded[..., : sizes.nope_dim].reshape(*shape, -1)
            by_token[0, ..., sizes.nope_dim : sizes.query_dim] = keys.view(*shape[:2], 1, -1)
            by_token[1, ..., : sizes.value_dim] = expanded[..., sizes.nope_dim :].reshape(*shape, -1)
            padded = query.new_zeros((query.shape[0], heads, dim))
            padded[..., : sizes.query_dim] = query[:, first : first + heads]
            attended = self._kernels.paged_attention(
                padded, PoolView.over(own), 0, chunk.batch, scale=sizes.scale, window=None
            )
            found.append(attended.view(query.shape[0], heads, dim)[..., : sizes.value_dim])
            first += heads
        return torch.cat(found, dim=1).flatten(1)


def least_expanded(sizes: LatentConfig) -> int | None:
    """The shortest chunk for which expanding costs less: a cached token and head, kv_rank · (nope_dim + value_dim)
    products once, then query_dim + value_dim in place of cached_dim + kv_rank for each token of the chunk.

    None where it never does.
    """
    saved = sizes.cached_dim + sizes.kv_rank - sizes.query_dim - sizes.value_dim
    if saved <= 0:
        return None
    return max(2, -(-sizes.kv_rank * (sizes.nope_dim + sizes.value_dim) // saved))


@dataclass(frozen=True, eq=False)
class Chunk:
    """One sequence's long query."""

    rows: slice  # of the step's tokens
    table: Tensor  # [num_blocks] int64, the blocks of its `kv_len` tokens
    batch: AttentionBatch  # the same sequence over a pool of its own, block after block


@dataclass(frozen=True, eq=False)
class Parts:
    """A step's sequences by the length of their queries; the same for all layers."""

    short: AttentionBatch | None
    short_rows: Tensor  # [num_tokens of short] int64, rows of the step's tokens
    long: tuple[Chunk, ...]


def split_by_length(batch: AttentionBatch, least: int) -> Parts:
    """Queries of at least `least` tokens apart from the others. Only sizes are read on the host: the device is given
    nothing, and not waited for."""
    ends = list(accumulate(batch.query_lens))
    long: list[Chunk] = []
    short: list[int] = []
    for seq, (count, end) in enumerate(zip(batch.query_lens, ends, strict=True)):
        if count >= least:
            long.append(_chunk(batch, seq, slice(end - count, end)))
        else:
            short.append(seq)
    counts = batch.query_start.diff()
    is_long = (counts >= least).to(torch.int8)
    of_token = is_long.repeat_interleave(counts, output_size=batch.num_tokens)
    rows = torch.argsort(of_token, stable=True)[: sum(batch.query_lens[seq] for seq in short)]
    chosen = torch.argsort(is_long, stable=True)[: len(short)]
    return Parts(_subset(batch, short, chosen, rows) if short else None, rows, tuple(long))


def _chunk(batch: AttentionBatch, seq: int, rows: slice) -> Chunk:
    query_len, kv_len = batch.query_lens[seq], batch.kv_lens[seq]
    num_blocks = -(-kv_len // batch.block_size)
    table = batch.block_tables[seq, :num_blocks]
    own = AttentionBatch(
        query_start=batch.query_start[seq : seq + 2] - batch.query_start[seq],
        seq_lens=batch.seq_lens[seq : seq + 1],
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=table.device)[None],
        slots=torch.arange(kv_len - query_len, kv_len, device=table.device),
        query_lens=(query_len,),
        kv_lens=(kv_len,),
        block_size=batch.block_size,
    )
    return Chunk(rows, table.long(), own)


def _subset(batch: AttentionBatch, seqs: Sequence[int], chosen: Tensor, rows: Tensor) -> AttentionBatch:
    """The sequences `seqs`, which `chosen` [len(seqs)] names on the device, and their `rows` of the step's tokens."""
    counts = batch.query_start.diff()[chosen]
    return AttentionBatch(
        query_start=functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
        seq_lens=batch.seq_lens[chosen],
        block_tables=batch.block_tables[chosen],
        slots=batch.slots[rows],
        query_lens=tuple(batch.query_lens[seq] for seq in seqs),
        kv_lens=tuple(batch.kv_lens[seq] for seq in seqs),
        block_size=batch.block_size,
    )
