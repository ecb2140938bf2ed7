"""Checksums of blocks of the pool, beside the running step."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.runner.device_link import DeviceLink
from shared.kernels.block_ops import BlockOps
from shared.kv.checksum import BlockChecksum
from shared.kv.layout import BlockLayout


class BlockSums:
    """On a CUDA device by the backend's kernel on a stream of its own; in host memory by `BlockChecksum`."""

    def __init__(self, layout: BlockLayout, kv_blocks: Tensor, kernels: BlockOps, link: DeviceLink) -> None:
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
        self._kernels = kernels
        self._link = link
        self._aside = link.side_stream()
        self._on_host = None if kv_blocks.is_cuda else BlockChecksum(layout.block_bytes // 8, kv_blocks.device)

    def of(self, block_ids: list[int]) -> list[int]:
        """Checksums of these blocks as they are now, behind the copies that were queued; no step in flight may write
        to them. Waits for the device."""
        with self._aside.entered():
            if self._on_host is not None:
                return self._on_host.checksum_blocks(self._kv_blocks, block_ids)
            ids = self._link.send(torch.tensor(block_ids, dtype=torch.int64))
            sums = self._kernels.block_checksums(self._kv_blocks, ids)
            return [value % (1 << 64) for value in sums.tolist()]
