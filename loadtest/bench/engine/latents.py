"""`python -m loadtest.bench latents`: decode steps over latents beside the same model with its heads' keys and values.

Both are one model with the same weights, in turns. The second expands each new token's latent once, keeps keys and
values in a pool of its own, and attends to them as models without latents do.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor

from loadtest.bench.engine.cpu import BLOCK_SIZE, DTYPES, Bench
from loadtest.bench.engine.limits import read_bandwidth
from loadtest.bench.engine.work import weight_bytes
from loadtest.bench.shapes import SHAPES, checkpoint
from loadtest.command_line import Out, choice, integers
from loadtest.figures import Result, machine, table, write
from shared.engine.runner.runner import Runner
from shared.kernels.batch import AttentionBatch
from shared.model.decoder import Decoder
from shared.model.latent_attention_block import HEAD_DIM_STEP, LatentAttentionBlock

EXPANDED = "expanded KV"
FILLED_AT_ONCE = 64
"""Blocks."""


class ExpandedAttention:
    """A layer's latent attention with keys and values of all heads in the cache: the interface of the block it wraps.

    Keys and values share a row's width in the pool, so the shorter ones are padded with zeros.
    """

    def __init__(self, inner: LatentAttentionBlock, num_blocks: int, dtype: torch.dtype) -> None:
        self._inner = inner
        self._sizes = sizes = inner._sizes
        self._num_heads = inner._num_heads
        dim = -(-max(sizes.query_dim, sizes.value_dim) // HEAD_DIM_STEP) * HEAD_DIM_STEP
        self.pool = torch.zeros(num_blocks, 1, 2, self._num_heads, BLOCK_SIZE, dim, dtype=dtype)

    def place(self, x: Tensor, cos: Tensor, sin: Tensor, kv_blocks: Tensor, slots: Tensor) -> Tensor:
        """See `LatentAttentionBlock`; expands what it wrote."""
        query = self._inner.place(x, cos, sin, kv_blocks, slots)
        self.expand(kv_blocks, slots)
        return query

    def expand(self, kv_blocks: Tensor, slots: Tensor) -> None:
        """The latents in these slots [num_slots] to keys and values in the pool."""
        sizes, blocks, offsets = self._sizes, slots // BLOCK_SIZE, slots % BLOCK_SIZE
        rows = kv_blocks[blocks, self._inner._index, 0, 0, offsets]
        latents = rows[:, : sizes.kv_rank].contiguous()
        heads = torch.cat([part.forward(latents) for part in self._inner._modules.expand], dim=1)
        by_head = heads.view(len(slots), self._num_heads, -1)
        keys, values = torch.split(by_head, [sizes.nope_dim, sizes.value_dim], dim=2)
        self.pool[blocks, 0, 0, :, offsets, : sizes.nope_dim] = keys
        self.pool[blocks, 0, 0, :, offsets, sizes.nope_dim : sizes.query_dim] = rows[:, None, sizes.kv_rank :]
        self.pool[blocks, 0, 1, :, offsets, : sizes.value_dim] = values

    def attend(self, query: Tensor, kv_blocks: Tensor, batch: AttentionBatch) -> Tensor:  # noqa: ARG002
        """See `LatentAttentionBlock`."""
        num_tokens, dim, scale = query.shape[0], self.pool.shape[5], self._sizes.scale
        padded = torch.nn.functional.pad(query, (0, dim - query.shape[2]))
        found = self._inner._kernels.paged_attention(padded, self.pool, 0, batch, scale=scale, window=None)
        return found.view(num_tokens, self._num_heads, dim)[..., : self._sizes.value_dim].flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        """See `LatentAttentionBlock`."""
        return self._inner.project(attended)


def expanded(decoder: Decoder, num_blocks: int) -> tuple[Decoder, list[ExpandedAttention]]:
    """The same model with expanded KV, and its attention."""
    other = copy.copy(decoder)
    other.pieces = copy.copy(decoder.pieces)
    blocks = []
    for block in decoder.pieces._attention:
        assert isinstance(block, LatentAttentionBlock)
        blocks.append(ExpandedAttention(block, num_blocks, decoder.dtype))
    other.pieces._attention = list(blocks)  # type: ignore[arg-type]
    return other, blocks


def fill(pool: Tensor, layers: list[ExpandedAttention]) -> None:
    """Random latents in all blocks of a pool, and what they expand to."""
    pool.normal_()
    for layer in layers:
        for slots in torch.split(torch.arange(pool.shape[0] * BLOCK_SIZE), FILLED_AT_ONCE * BLOCK_SIZE):
            layer.expand(pool, slots)


@dataclass(frozen=True)
class Pair:
    """Bytes and time of a decode step, latents and expanded."""

    name: str
    kv_bytes: tuple[float, float]  # that attention reads
    step_s: tuple[float, float]  # medians
    ratio: float  # of the steps, expanded over latents, median of pairs

    def results(self, weights_bytes: float, bandwidth: float) -> list[Result]:
        """Rows of the table; `bandwidth` in bytes a second says how long reading takes at least."""
        rows = []
        for peer, kv_bytes, step_s in zip((None, EXPANDED), self.kv_bytes, self.step_s, strict=True):
            least_s = (weights_bytes + kv_bytes) / bandwidth
            ratio = self.ratio if peer else None
            rows += [
                Result(f"{self.name}: step", 1e3 * step_s, "ms", 1e3 * least_s, least_s / step_s, peer, ratio),
                Result(f"{self.name}: KV read", kv_bytes / 2**20, "MiB", peer=peer),
            ]
        return rows


class Comparison:
    """A model over latents, and the same over expanded KV."""

    def __init__(self, folder: Path, dtype: torch.dtype, num_kv_tokens: int) -> None:
        """Raises typer.BadParameter for a model without latents."""
        self.bench = Bench(folder, dtype, "auto", num_kv_tokens)
        decoder, runner = self.bench.decoder, self.bench.runner
        if decoder.config.latent is None:
            raise typer.BadParameter("has no latents", param_hint="--model")
        num_blocks = runner.kv_blocks.shape[0]
        other, layers = expanded(decoder, num_blocks)
        self.other = Runner(other, self.bench.layout, num_blocks)
        with torch.inference_mode():
            fill(runner.kv_blocks, layers)
        self._expanded_block_bytes = sum(layer.pool[0].nbytes for layer in layers)

    def measure(self, batch: int, context: int, repeats: int) -> Pair:
        """A decode step of `batch` sequences with `context` cached tokens each."""
        plan, runners = self.bench.plan(batch, context, 1), (self.bench.runner, self.other)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            for runner, found in zip(runners, times, strict=True):
                self.bench.runner = runner
                found.append(self.bench.step_s(plan, 1))
        self.bench.runner = runners[0]
        blocks = batch * context / BLOCK_SIZE
        return Pair(
            f"decode {batch} at {context}",
            (blocks * self.bench.layout.block_bytes, blocks * self._expanded_block_bytes),
            (median(times[0]), median(times[1])),
            median(other / ours for ours, other in zip(*times, strict=True)),
        )


def main(
    model: Annotated[str, typer.Option(help="a model folder with latents, or a shape")] = "deepseek-v2-lite",
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES))] = "bf16",
    batch: Annotated[str, typer.Option(help="sequences that decode")] = "1 8",
    context: Annotated[str, typer.Option(help="cached tokens of each of them")] = "256 2048 8192",
    threads: Annotated[int, typer.Option(help="compute threads; 0 = all cores")] = 0,
    repeats: Annotated[int, typer.Option(help="pairs of steps")] = 9,
    out: Out = None,
) -> None:
    """Compare decode steps over latents with the same model's over expanded keys and values, in turns."""
    torch_dtype = DTYPES[choice(dtype, "dtype", DTYPES)]
    if threads:
        torch.set_num_threads(threads)
    batches, contexts = integers(batch, "batch"), integers(context, "context")
    folder = checkpoint(model) if model in SHAPES else Path(model)
    comparison = Comparison(folder, torch_dtype, max(batches) * (max(contexts) + BLOCK_SIZE))
    results = []
    for length in contexts:
        for count in batches:
            weights = weight_bytes(comparison.bench.decoder, count)
            results += comparison.measure(count, length, repeats).results(weights, read_bandwidth(3))
    print(f"{model} in {dtype}, kernels {comparison.bench.decoder.kernels.name}, on {machine()}\n")
    print(table(results))
    if out is not None:
        write(out, results)
