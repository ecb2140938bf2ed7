"""How many KV blocks fit into a device's memory, the pool's allocation, and host memory for preempted sequences."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.plan import BlockCopy
from shared.engine.runner.device_link import DeviceLink
from shared.errors import ConfigError
from shared.kv.layout import BlockLayout

MIN_BLOCKS = 2
"""A sequence's block and one to grow into, of each KV group."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory that a device has left for the pool."""

    free_bytes: int
    """Bytes that this process may take once the weights are loaded."""
    step_bytes: int
    """Peak of the memory that a step takes and gives back."""
    share: float
    """The pool's share of the memory that then remains: graphs, compiled kernels and fragmentation need the rest."""

    def num_blocks(self, layout: BlockLayout) -> int:
        """Blocks that fit."""
        return max(0, int((self.free_bytes - self.step_bytes) * self.share) // layout.block_bytes)

    def choose(self, wanted: int, most: int, layout: BlockLayout, fewest: int | None = None) -> int:
        """`wanted` blocks, or with 0 as many as fit, at most `most`. `fewest`: what the rank of a group with the least
        room has room for.

        Raises ConfigError where they do not fit; the message names how many do, and what to change.
        """
        own = self.num_blocks(layout)
        fitting = own if fewest is None else min(own, fewest)
        chosen, least = wanted or min(fitting, most), MIN_BLOCKS * layout.groups.size
        if max(chosen, least) > fitting:
            raise does_not_fit(
                max(chosen, least),
                fitting,
                layout,
                f"of {self.free_bytes / _GIB:.2f} GiB free with the weights loaded, the largest step takes "
                f"{self.step_bytes / _GIB:.2f} GiB, and {self.share:.0%} of the rest is the pool's"
                + (f"; that is room for {own}, but another rank of the group has less" if fitting < own else ""),
            )
        if chosen < least:
            raise ConfigError(
                f"num_kv_blocks must be at least {least}, got {chosen}", field="num_kv_blocks", limit=least
            )
        return chosen


def does_not_fit(wanted: int, fitting: int, layout: BlockLayout, why: str) -> ConfigError:
    """The error for a pool that is too large."""
    return ConfigError(
        f"{wanted} KV blocks of {layout.block_bytes} bytes do not fit, {fitting} do: {why}. Set num_kv_blocks to at "
        f"most {fitting}, or make room: a smaller max_num_batched_tokens or max_num_seqs, a dtype or kv_dtype of "
        f"16 or 8 bits instead of fp32, a larger gpu_memory, a smaller model or a larger device",
        field="num_kv_blocks",
        limit=fitting,
    )


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now, what torch keeps for reuse included."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def within_share(free_bytes: int, total_bytes: int, used_bytes: int, share: float) -> int:
    """Bytes that a process may still take of a device where others may run: of what is free, no more than its share of
    the whole leaves beside the `used_bytes` that it holds already."""
    return max(0, min(free_bytes, int(total_bytes * share) - used_bytes))


def allocate_pool(layout: BlockLayout, num_blocks: int, device: torch.device) -> Tensor:
    """[num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8, zeros: a masked-out position of a
    block never written must not be NaN (0 * NaN is NaN).

    Raises ConfigError where they do not fit; the message names how many would.
    """
    try:
        return torch.zeros(layout.shape(num_blocks), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's own out-of-memory errors are of this class
        free = free_bytes(device)
        why = f"{free / _GIB:.2f} GiB are free on {device}"
        raise does_not_fit(num_blocks, free // layout.block_bytes, layout, why) from error


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
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8
        try:
            self._slots = torch.empty(layout.shape(num_slots), dtype=torch.uint8, pin_memory=kv_blocks.is_cuda)
        except RuntimeError as error:  # torch's own out-of-memory errors are of this class
            raise ConfigError(
                f"{num_slots * layout.block_bytes} bytes of host memory for preempted sequences cannot be had",
                field="host_swap_bytes",
            ) from error

    def run(self, copies: Sequence[BlockCopy]) -> None:
        """Queues the copies in this order."""
        for copy in copies:
            block = self._kv_blocks[copy.block_id]
            if copy.source_id is not None:
                self._link.copy(self._kv_blocks[copy.source_id], block)
                continue
            slot = self._slots[copy.host_slot]
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
