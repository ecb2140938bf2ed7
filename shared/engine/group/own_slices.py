"""A rank's own pool as messages between it and the leader: rows of bytes, one a block, of one length on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.engine.runner.device_link import DeviceLink
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kv.checksum import BlockChecksum
from shared.kv.checksum_weights import checksum_weights
from shared.kv.layout import CHECKSUM_WORD_BYTES, BlockLayout
from shared.model.ranks.block_slices import BlockSlice

MESSAGE_BYTES = 16 << 20
"""Most bytes of the rows of one message, unless one row is longer."""
MOST_ROWS = 60


class SliceForm:
    """Cuts whole blocks into the slices of a group's ranks, and joins them."""

    def __init__(self, layout: BlockLayout, slices: Sequence[BlockSlice]) -> None:
        """`layout`: of whole blocks."""
        self.layout = layout
        self.slices = tuple(slices)
        blank = torch.empty(layout.shape(1)[1:], dtype=torch.uint8, device="meta")
        self.num_bytes = tuple(self.cut(blank, rank).nbytes for rank in range(len(self.slices)))
        """Bytes of each rank's slice of a block."""
        self.row_bytes = max(self.num_bytes)
        self.most_rows = max(1, min(MOST_ROWS, MESSAGE_BYTES // self.row_bytes))
        """Most rows in one message."""

    def block(self, memory: memoryview) -> Tensor:
        """A whole block's memory as [num_layers, num_planes, num_kv_heads, head_bytes]."""
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.layout.shape(1)[1:])

    def cut(self, block: Tensor, rank: int) -> Tensor:
        """A rank's slice of a block [num_layers, num_planes, num_kv_heads, …], a view."""
        part = self.slices[rank]
        return block[part.layers.begin : part.layers.end, :, part.heads.begin : part.heads.end]

    def read(self, row: Tensor, block: Tensor, rank: int) -> None:
        """Puts a rank's row [row_bytes] where it belongs in a whole block."""
        target = self.cut(block, rank)
        with in_this_thread(row, row.numel()):
            target.copy_(row[: self.num_bytes[rank]].view(target.shape))

    def write(self, block: Tensor, row: Tensor, rank: int) -> None:
        """Puts a rank's slice of a whole block into its row [row_bytes]."""
        source = self.cut(block, rank)
        with in_this_thread(row, row.numel()):
            row[: self.num_bytes[rank]].view(source.shape).copy_(source)


class OwnSlices:
    """One rank's. One thread at a time calls, beside the steps, for blocks that no step writes to."""

    def __init__(self, form: SliceForm, rank: int, kv_blocks: Tensor, link: DeviceLink) -> None:
        """kv_blocks: the rank's pool, [num_blocks, own layers, num_planes, own KV heads, head_bytes] uint8."""
        words = checksum_weights(form.layout.block_bytes // CHECKSUM_WORD_BYTES)
        num_layers, num_planes, num_kv_heads = form.layout.shape(1)[1:4]
        by_head = torch.from_numpy(words.view(np.int64)).view(num_layers, num_planes, num_kv_heads, -1)
        own = form.cut(by_head, rank).contiguous().view(-1).numpy().view(np.uint64)
        self._num_bytes = form.num_bytes[rank]
        assert kv_blocks[0].nbytes == self._num_bytes, "the pool is not of this rank's slices"
        self._kv_blocks = kv_blocks
        self._bytes = kv_blocks.view(kv_blocks.shape[0], -1)  # [num_blocks, num_bytes]
        self._link = link
        self._aside = link.side_stream()
        self._sums = BlockChecksum(len(own), kv_blocks.device, own)
        self.rows = torch.zeros((form.most_rows, form.row_bytes), dtype=torch.uint8, pin_memory=kv_blocks.is_cuda)
        """Buffer for the rows of one message, in host memory."""

    def read(self, block_ids: Sequence[int]) -> Tensor:
        """[num_blocks, row_bytes], the first of `rows`, filled from the pool."""
        rows = self.rows[: len(block_ids)]
        with self._aside.entered(), in_this_thread(rows, rows.numel()):
            for row, block_id in zip(rows, block_ids, strict=True):
                self._link.copy(self._bytes[block_id], row[: self._num_bytes])
        self._aside.synchronize()
        return rows

    def write(self, block_ids: Sequence[int], rows: Tensor) -> None:
        """Fills blocks of the pool from [num_blocks, row_bytes] in host memory, before it returns."""
        with self._aside.entered(), in_this_thread(rows, rows.numel()):
            for row, block_id in zip(rows, block_ids, strict=True):
                self._link.copy(row[: self._num_bytes], self._bytes[block_id])
        self._aside.synchronize()

    def sums(self, block_ids: Sequence[int]) -> Tensor:
        """[num_blocks] int64: what these blocks' slices add to the checksums of the whole blocks, mod 2^64."""
        with self._aside.entered():
            found = self._sums.checksum_blocks(self._kv_blocks, block_ids)
        return torch.from_numpy(np.array(found, dtype=np.uint64).view(np.int64))
