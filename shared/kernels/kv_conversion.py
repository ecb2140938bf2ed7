"""Blocks converted to codes where they are sent, for decode workers that keep KV in fewer bits than prefill workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shared.kernels.pool_view import PoolView, encode
from shared.kv.block_memory import AsSent, BlockMemory, host_bytes
from shared.kv.checksum_weights import checksum_weights, weighted_sum
from shared.kv.layout import BlockLayout


class BlockConversion:
    """From one layout's blocks to those that its `handed_off` has. For any thread."""

    def __init__(self, layout: BlockLayout) -> None:
        """`layout`: of a prefill worker that converts what it sends."""
        assert layout.format.sent
        self._layout = layout
        self._to = layout.handed_off
        self._weights = checksum_weights(self._to.block_bytes // 8)

    def convert(self, blocks: Sequence[BlockMemory]) -> list[AsSent]:
        """Converts whole blocks in host memory. A token's head becomes codes and a scale from its own numbers alone, as
        the kernels write them (`encode`): what is sent does not depend on which blocks are converted together."""
        return [self._convert(host_bytes(block)) for block in blocks]

    def _convert(self, block: memoryview) -> AsSent:
        wide = PoolView.of(torch.frombuffer(block, dtype=torch.uint8)[None], self._layout)
        sent = np.empty(self._to.block_bytes, np.uint8)
        narrow = PoolView.of(torch.from_numpy(sent)[None], self._to)
        codes, scales = encode(wide.rows, narrow.dtype)
        narrow.rows.view(torch.uint8).copy_(codes.view(torch.uint8))
        narrow.scales.copy_(scales)
        return AsSent(sent.data, weighted_sum(sent.view(np.dtype("<u8")), self._weights))
