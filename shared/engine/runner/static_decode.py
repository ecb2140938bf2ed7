"""Decode steps over tensors that never move, at fixed batch sizes: what a CUDA graph can capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.engine.plan import PlannedSequence, StepPlan
from shared.engine.runner.cuda_graphs import CudaGraphs, Replayable, capture_sizes, padded_size
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.heads import HeadInputs
from shared.engine.sampling_params import SamplingParams
from shared.kernels.batch import AttentionBatch
from shared.kernels.lora.step import LoraSlots, PackedAdapter
from shared.kernels.pool_view import PoolView, dtype_name
from shared.kernels.sampling.rows import SamplingRows
from shared.kv.groups import NO_BLOCK, KVGroups
from shared.model.decoder import Decoder

_FIELDS = {
    "token_ids": torch.int64,
    "pending": torch.int64,  # -1: token_ids holds it; else where among the tokens of the step before it stands
    "seeds": torch.int64,
    "top_ps": torch.float64,
    "seq_lens": torch.int32,
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "min_ps": torch.float32,
}
"""Rows of inputs by type, the larger types first, so that each begins at a multiple of its size."""
_ROW_BYTES = sum(dtype.itemsize for dtype in _FIELDS.values())


class _Found(NamedTuple):
    """What a step gives, in the memory of its graph."""

    logits: Tensor  # [size, vocab_size] fp32
    for_head: HeadInputs | None  # None without a head


class StaticDecode:
    """Runs steps in which every sequence computes one token and samples the next.

    A step is padded to the next of the capture sizes. Padding rows read and write one block of the pool that no
    sequence uses. With graphs, `start()` captures each size; without, the same function runs eagerly.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: PoolView,  # its last block is for padding
        max_batch: int,
        max_seq_len: int,
        link: DeviceLink,
        graphs: CudaGraphs | None,
        groups: KVGroups | None = None,
        loras: LoraSlots | None = None,
    ) -> None:
        """Allocates the buffers of every capture size; max_seq_len in tokens. `graphs`: None = steps run eagerly.
        `groups`: of KV, whose blocks take turns in a sequence's table; None: one. `loras`: None = no step has
        adapters."""
        self._decoder = decoder
        self._pool = pool
        self._block_size = pool.block_size
        self._sizes = capture_sizes(max_batch)
        self._inputs = {size: StaticInputs(size, link) for size in self._sizes}
        width = -(-max_seq_len // self._block_size)
        groups = groups or KVGroups(pool.block_size)
        self._num_groups, padding = groups.size, pool.num_blocks - 1
        self._tables = [StaticTables(max_batch, width, padding, link) for _ in range(groups.size - groups.num_states)]
        self._states = StaticStates(max_batch, groups, padding, link) if groups.num_states else None
        self._link = link
        device = link.device
        self._query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(max_batch, dtype=torch.int64, device=device)
        self.sampled: Tensor = torch.zeros(max_batch, dtype=torch.int64, device=device)
        """[max_batch] int64, the tokens that the last step sampled; -1 where there was nothing to choose."""
        self._graphs = graphs
        self._captured: dict[tuple[int, bool], tuple[Replayable, _Found]] = {}  # by size and adapters
        self._loras = loras
        self._held: set[int] = set()  # slots that `loras` computes with

    def start(self) -> None:
        """Captures the graphs, where there are graphs; the largest first, so that the others fit into its memory."""
        if self._graphs is None:
            return
        for with_loras in (False, True) if self._loras is not None else (False,):
            for size in reversed(self._sizes):
                self._captured[size, with_loras] = self._graphs.capture(
                    lambda size=size, with_loras=with_loras: self._forward(  # type: ignore[misc]
                        size, (1,) * size, with_loras=with_loras
                    )
                )

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """As `AdapterSlots.place`."""
        if self._loras is not None:
            self._held.discard(slot)
            if self._loras.place(slot, adapter):
                self._held.add(slot)

    def takes(self, plan: StepPlan) -> bool:
        """Whether `run` can run this step."""
        items = plan.sequences
        if len(items) > self._sizes[-1] or plan.num_tokens > len(items):
            return False
        width = self._tables[0].width * self._num_groups
        for item in items:
            if item.adapter and item.adapter not in self._held:
                return False
            if not item.samples or item.targets or len(item.block_ids) > width:
                return False
        return True

    def run(self, plan: StepPlan) -> tuple[Tensor, Tensor, HeadInputs | None]:
        """([n, vocab_size] fp32 logits, [n] int64 tokens) of the plan's n sequences, and what a head reads, with the
        padding; all hold until the next step.

        Tokens are sampled from the logits as they are: no penalties, nothing banned.
        """
        items = plan.sequences
        size = padded_size(self._sizes, len(items))
        self._inputs[size].fill(items)
        num_groups = self._num_groups
        if self._states is not None:
            self._states.fill(items, size)
        for group, tables in enumerate(self._tables):
            of_group = slice(group, None, num_groups)
            tables.fill([item.block_ids if num_groups == 1 else item.block_ids[of_group] for item in items], size)
        with_loras = any(item.adapter for item in items)
        if self._loras is not None and with_loras:
            self._loras.fill([item.adapter for item in items], size, self._link.empty)
        if self._graphs is None:
            found = self._forward(size, _lengths(items, size), with_loras=with_loras)
        else:
            graph, found = self._captured[size, with_loras]
            graph.replay()
        for_head = None if found.for_head is None else found.for_head.at(_lengths(items, size))
        return found.logits[: len(items)], self.sampled[: len(items)], for_head

    def _forward(self, size: int, kv_lens: Sequence[int], *, with_loras: bool) -> _Found:
        """What the present inputs give; writes `sampled`. Does nothing that a graph cannot hold.

        Kernels that follow the lengths on the device ignore `kv_lens`.
        """
        inputs = self._inputs[size]
        earlier = self.sampled.index_select(0, inputs.pending.clamp(min=0)).clamp(min=0)
        token_ids = torch.where(inputs.pending < 0, inputs.token_ids, earlier)
        positions = inputs.seq_lens.long() - 1
        first, *later = [self._batch(size, of_group.tables[:size], positions, kv_lens) for of_group in self._tables]
        batch = first.with_groups(later) if self._num_groups > 1 else first
        if self._states is not None:
            batch = replace(batch, state_blocks=self._states.blocks[:size])
        lengths = positions + 1 if self._decoder.rotary.needs_lengths else None  # behind the prompt all of them count
        rows = self._logit_rows[:size]
        loras = self._loras.step(size) if self._loras is not None and with_loras else None
        decoder, head = self._decoder, self._decoder.head
        kept = None if head is None else head.empty_states(size)
        hidden = decoder.hidden(token_ids, positions, self._pool, batch, rows, lengths, loras, kept)
        logits = decoder.logits(hidden)
        self.sampled[:size].copy_(decoder.kernels.sample_tokens(logits, inputs.rows()))
        read = hidden if head is None or kept is None else head.joined(kept)
        return _Found(logits, None if head is None else HeadInputs(positions, batch, read))

    def _batch(self, size: int, tables: Tensor, positions: Tensor, kv_lens: Sequence[int]) -> AttentionBatch:
        """Over the `tables` of one KV group, [size, width] int32."""
        blocks = tables.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
        return AttentionBatch(
            query_start=self._query_start[: size + 1],
            seq_lens=self._inputs[size].seq_lens,
            block_tables=tables,
            slots=blocks * self._block_size + positions % self._block_size,
            query_lens=(1,) * size,
            kv_lens=tuple(kv_lens),
            block_size=self._block_size,
        )


class StaticInputs:
    """One entry a row, for batches of exactly `size` rows; rows beyond a batch are padding.

    A padding row is a sequence of one token, token 0, sampled greedily.
    """

    def __init__(self, size: int, link: DeviceLink) -> None:
        self.size = size
        self._link = link
        self._bytes = torch.zeros(size * _ROW_BYTES, dtype=torch.uint8, device=link.device)
        views, begin = {}, 0
        for name, dtype in _FIELDS.items():
            end = begin + size * dtype.itemsize
            views[name] = self._bytes[begin:end].view(dtype)
            begin = end
        self.token_ids = views["token_ids"]  # [size], as all of them
        self.pending = views["pending"]
        self.seq_lens = views["seq_lens"]  # int32, KV length with this step's token
        self._views = views
        self._columns = _columns(np.zeros(size * _ROW_BYTES, dtype=np.uint8), size)  # as they are on the device
        self._params: list[SamplingParams] | None = None  # those in the columns
        self._values: dict[str, list[int]] = {}  # likewise
        self.fill([])

    def rows(self) -> SamplingRows:
        """How to choose each row's token, whose index in its sequence is the row's length."""
        views = self._views
        return SamplingRows(
            temperatures=views["temperatures"],
            top_ks=views["top_ks"],
            top_ps=views["top_ps"],
            min_ps=views["min_ps"],
            seeds=views["seeds"],
            positions=self.seq_lens.long(),
        )

    def fill(self, items: Sequence[PlannedSequence]) -> None:
        """Queue the values of a step of one token a sequence, each with its SampleSpec."""
        params = [item.samples[0].params for item in items]
        assert len(params) <= self.size
        count, columns = len(items), self._columns
        if params != self._params:  # seldom: only where sequences come or go
            self._fill_params(params)
        for name, values, padding in (
            ("token_ids", [item.token_ids[0] for item in items], 0),
            ("pending", [-1 if item.pending is None else item.pending for item in items], -1),
            ("seq_lens", [item.start + 1 for item in items], 1),
        ):
            if values != self._values.get(name):  # with steps ahead the first two stay the same while the batch does
                self._values[name] = values
                columns[name][:count] = values
                columns[name][count:] = padding
        host = self._link.empty(self._bytes.shape[0])
        host.numpy()[:] = self._columns["bytes"]
        self._bytes.copy_(host, non_blocking=True)

    def _fill_params(self, params: list[SamplingParams]) -> None:
        """Fills the sampling parameters, which stay the same from step to step while the batch does."""
        count, columns = len(params), self._columns
        for name, values, padding in (
            ("seeds", [_signed(p.seed or 0) for p in params], 0),
            ("top_ps", [p.top_p for p in params], 1.0),
            ("temperatures", [0.0 if p.is_greedy else p.temperature for p in params], 0.0),
            ("top_ks", [p.top_k for p in params], 0),
            ("min_ps", [p.min_p for p in params], 0.0),
        ):
            columns[name][:count] = values
            columns[name][count:] = padding
        self._params = params


class StaticTables:
    """Block tables of the rows, of fixed width, with a mirror on the host by which only changes are copied."""

    def __init__(self, num_rows: int, width: int, padding_block: int, link: DeviceLink) -> None:
        """Every row begins as padding: its one block is `padding_block`."""
        self._link = link
        self._padding: tuple[int, ...] = (padding_block,)
        self._rows: list[tuple[int, ...]] = [self._padding] * num_rows
        self._mirror = np.full((num_rows, width), padding_block, dtype=np.int32)
        self.tables: Tensor = torch.full((num_rows, width), padding_block, dtype=torch.int32, device=link.device)
        """[num_rows, width] int32."""

    @property
    def width(self) -> int:
        """Blocks that a row holds at most."""
        return self.tables.shape[1]

    def fill(self, block_tables: Sequence[tuple[int, ...]], num_rows: int) -> None:
        """Queue what changed since the last call in the first `num_rows` rows; those past the tables are padding."""
        wanted = [*block_tables, *[self._padding] * (num_rows - len(block_tables))]
        is_new = [new is not old and new != old for new, old in zip(wanted, self._rows, strict=False)]
        if True not in is_new:
            return
        for row in compress(range(num_rows), is_new):
            new, old = wanted[row], self._rows[row]
            # Most changes are a block more.
            begin = len(old) if new[: len(old)] == old else 0
            self._mirror[row, begin : len(new)] = new[begin:]
            self._rows[row] = new
        used = max(map(len, wanted))
        host = self._link.empty(num_rows * used * 4).view(torch.int32).view(num_rows, used)
        host.numpy()[:] = self._mirror[:num_rows, :used]
        self.tables[:num_rows, :used].copy_(host, non_blocking=True)


class StaticStates:
    """The blocks of groups of states that each row of a decode step reads and writes, with a mirror on the host."""

    def __init__(self, num_rows: int, groups: KVGroups, padding_block: int, link: DeviceLink) -> None:
        """Every row begins as padding: it reads nothing and writes to `padding_block`."""
        self._groups = groups
        self._link = link
        nothing = (NO_BLOCK,) * groups.num_states
        self._padding = (nothing, nothing, (padding_block,) * groups.num_states)
        self._rows: list[tuple[tuple[int, ...], tuple[int, int, int]] | None] = [None] * num_rows  # None: padding
        self._mirror = np.empty((num_rows, 3, groups.num_states), dtype=np.int32)
        self._mirror[:] = self._padding
        self.blocks: Tensor = torch.from_numpy(self._mirror.copy()).to(link.device, non_blocking=True)
        """[num_rows, 3, num_states] int32, as `AttentionBatch.state_blocks`."""

    def fill(self, items: Sequence[PlannedSequence], num_rows: int) -> None:
        """Queue what changed since the last call in the first `num_rows` rows; those past the items are padding."""
        changed = False
        for row in range(num_rows):
            old = self._rows[row]
            if row >= len(items):
                if old is not None:
                    self._mirror[row], self._rows[row], changed = self._padding, None, True
                continue
            item = items[row]
            places = self._groups.state_places(item.start, item.start + 1)
            if old is None or old[0] is not item.block_ids or old[1] != places:
                self._mirror[row] = self._groups.state_blocks(item.block_ids, item.start, item.start + 1)
                self._rows[row], changed = (item.block_ids, places), True
        if changed:
            host = self._link.empty(self._mirror[:num_rows].nbytes).view(torch.int32).view(self.blocks[:num_rows].shape)
            host.numpy()[:] = self._mirror[:num_rows]
            self.blocks[:num_rows].copy_(host, non_blocking=True)


def _lengths(items: Sequence[PlannedSequence], size: int) -> tuple[int, ...]:
    """Of each row's KV with this step's token; padding has one."""
    return (*[item.start + 1 for item in items], *[1] * (size - len(items)))


def _columns(content: np.ndarray[tuple[int], np.dtype[np.uint8]], size: int) -> dict[str, Any]:
    """Arrays of `size` values by field over one block of memory, which is `bytes`."""
    columns: dict[str, Any] = {"bytes": content}
    begin = 0
    for name, dtype in _FIELDS.items():
        end = begin + size * dtype.itemsize
        columns[name] = content[begin:end].view(dtype_name(dtype))
        begin = end
    return columns


def _signed(seed: int) -> int:
    """The bits of an unsigned 64-bit number as a signed one."""
    return seed - (1 << 64) if seed >> 63 else seed
