"""Random sequences over a shuffled pool, and what attention over them must give."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import CODES, PoolView, encode
from shared.kv.layout import SCALE_BYTES

NUM_LAYERS, LAYER = 3, 1


def pool_of_nan(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> PoolView:
    """shape: [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]. Of codes the scales are NaN."""
    *heads, block_size, head_dim = shape
    head_bytes = block_size * (head_dim * dtype.itemsize + SCALE_BYTES * (dtype in CODES))
    memory = torch.full((*heads, head_bytes), 255, dtype=torch.uint8, device=device)
    return PoolView(memory, dtype, block_size, head_dim)


def stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What a pool of `dtype` keeps of rows, in fp64, where codes times scales are exact."""
    if dtype not in CODES:
        return rows.to(dtype).double()
    codes, scales = encode(rows, dtype)
    return codes.double() * scales.double()[..., None]


class AttentionCase:
    """All other slots of the pool are NaN, all other entries of the block tables ids that no pool has."""

    def __init__(
        self,
        plan: list[tuple[int, int]],  # (query_len, kv_len) of each sequence
        heads: tuple[int, int] = (4, 2),  # query heads, KV heads
        head_dim: int = 8,
        block_size: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        kv_dtype: torch.dtype | None = None,  # of the pool; None: as `dtype`
        num_planes: int = 2,  # 1: a row is key and value
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads

        def values(num_tokens: int, num_heads: int) -> Tensor:
            return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device, dtype)

        self.plan = plan
        self.group = num_heads // num_kv_heads
        kv_dtype = kv_dtype or dtype
        written = [[values(kv, num_kv_heads) for _, kv in plan] for _ in range(num_planes)]
        self.keys, self.values = ([stored(rows, kv_dtype) for rows in written[plane]] for plane in (0, num_planes - 1))
        self.query = values(sum(query_len for query_len, _ in plan), num_heads)
        widths = [-(-kv // block_size) for _, kv in plan]
        num_blocks = sum(widths) + 2
        free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.tables = [[free.pop() for _ in range(width)] for width in widths]
        query_lens, kv_lens = [q for q, _ in plan], [kv for _, kv in plan]
        self.batch = AttentionBatch.from_lists(query_lens, kv_lens, self.tables, block_size, device)
        for row, table in enumerate(self.tables):
            self.batch.block_tables[row, len(table) :] = 1 << 30
        shape = (num_blocks, NUM_LAYERS, num_planes, num_kv_heads, block_size, head_dim)
        self.pool = pool_of_nan(shape, kv_dtype, device)
        for plane, by_sequence in enumerate(written):
            for (_, kv), table, rows in zip(plan, self.tables, by_sequence, strict=True):
                slots = [table[position // block_size] * block_size + position % block_size for position in range(kv)]
                self.pool.write(plane, LAYER, torch.tensor(slots, device=device), rows)

    def put_holes(self, window: int) -> None:
        """In place of blocks that no token of the step sees, the tables repeat the next one, as an engine's do."""
        for table, (query_len, kv_len) in zip(self.batch.block_tables, self.plan, strict=True):
            num_holes = max(0, kv_len - query_len - window + 1) // self.batch.block_size
            table[:num_holes] = table[num_holes].clone()

    @property
    def sinks(self) -> Tensor:
        """[num_heads] fp32, the scores of sinks: from one that hides all keys to one that takes nothing."""
        return torch.linspace(9.0, -30.0, self.query.shape[1], device=self.query.device)

    def expected(
        self,
        window: int | None = None,
        scale: float = 0.3,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_chunked: bool = False,
    ) -> Tensor:
        """The formula in float64: [num_tokens, num_heads * head_dim], on the CPU."""
        chunks = []
        queries = self.query.double().cpu().split([query_len for query_len, _ in self.plan])
        for (query_len, kv_len), query, key, value in zip(self.plan, queries, self.keys, self.values, strict=True):
            key = key.double().cpu().repeat_interleave(self.group, dim=1)
            value = value.double().cpu().repeat_interleave(self.group, dim=1)
            positions = torch.arange(kv_len - query_len, kv_len)[:, None]
            seen = torch.arange(kv_len) <= positions
            if window is not None:
                begins = positions // window * window if is_chunked else positions - window + 1
                seen &= torch.arange(kv_len) >= begins
            scores = torch.einsum("qhd,khd->hqk", query, key) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                sink = sinks.double().cpu()[:, None, None].expand(-1, query_len, 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = scores.softmax(-1)[..., :kv_len]
            chunks.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        return torch.cat(chunks) if chunks else torch.empty(0, self.query[0:0].flatten(1).shape[1])
