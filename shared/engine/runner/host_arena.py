"""Host memory for the blocks of preempted sequences, and the copies there and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.plan import BlockCopy
from shared.engine.runner.device_link import DeviceLink
from shared.errors import ConfigError
from shared.kv.layout import BlockLayout


class HostArena:
    """Slots of one block each beside a pool. Copies run on the stream of the steps, in order with them; side streams
    wait for them."""

    def __init__(self, layout: BlockLayout, num_slots: int, kv_blocks: Tensor, link: DeviceLink) -> None:
        """Allocates num_slots * layout.block_bytes bytes, pinned where `kv_blocks` lies on a CUDA device; elsewhere
        the system gives a page when it is first written to. Raises ConfigError where they do not fit."""
        self._link = link
        self._has_run = threading.Condition()
        self.num_runs = 0
        """Calls of `run` that have returned."""
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
        try:
            # [num_slots, num_layers, num_planes, num_kv_heads, block_size, head_dim]
            self._slots = torch.empty(layout.shape(num_slots), dtype=kv_blocks.dtype, pin_memory=kv_blocks.is_cuda)
        except RuntimeError as error:  # torch's own out-of-memory errors are of this class
            raise ConfigError(
                f"{num_slots * layout.block_bytes} bytes of host memory for preempted sequences cannot be had",
                field="host_swap_bytes",
            ) from error

    def run(self, copies: Sequence[BlockCopy]) -> None:
        """Queues the copies in this order."""
        for copy in copies:
            block, slot = self._kv_blocks[copy.block_id], self._slots[copy.host_slot]
            if copy.to_host:
                self._link.copy(block, slot)
            else:
                self._link.copy(slot, block)
        self._link.mark_copies()
        with self._has_run:
            self.num_runs += 1
            self._has_run.notify_all()

    def wait_for_run(self, number: int) -> None:
        """Returns when `run` has returned so often. From any thread."""
        with self._has_run:
            self._has_run.wait_for(lambda: self.num_runs >= number)
