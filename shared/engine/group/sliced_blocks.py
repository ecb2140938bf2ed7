"""The leader's view of whole blocks whose slices lie in the pools of its group's ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shared.collectives.rank_links import RankLinks
from shared.engine.group.own_slices import OwnSlices, SliceForm
from shared.engine.group.slice_server import SliceAction, SliceCommand
from shared.engine.runner.block_access import StagingRing, staging_bytes
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pool_memory import HostArena, free_bytes
from shared.errors import RankLost
from shared.kv.block_memory import BlockMemory, host_bytes


class SlicedBlocks:
    """See `BlockAccess`: what travels is whole blocks, as from one pool, each in a slot of one ring of host memory.

    Each call is a command to all ranks and one gather or scatter of their slices; the caller waits for it. The event
    loop calls, and for checksums the engine's thread: one command at a time. All may raise RankLost.
    """

    waits_for_copies = False

    def __init__(
        self, form: SliceForm, links: RankLinks, kv_blocks: Tensor, link: DeviceLink, arena: HostArena | None
    ) -> None:
        """`kv_blocks`, `link` and `arena`: of the leader's own runner."""
        assert links.blocks is not None, "the ranks share one pool"
        self._form = form
        self._group = links.blocks
        self._slices = links.slices
        self._arena = arena
        self._own = OwnSlices(form, 0, kv_blocks, link)
        self._senders = [rank for rank, part in enumerate(form.slices) if part.is_sender]
        block_bytes = form.layout.block_bytes
        most = min(kv_blocks.shape[0], staging_bytes(free_bytes(torch.device("cpu"))) // block_bytes)
        self._ring = StagingRing(most, block_bytes, pinned=kv_blocks.is_cuda)
        self._turn = threading.Lock()
        self._is_closed = False

    def outgoing(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`; these are copies."""
        return [self._copied(block_id) for block_id in block_ids]

    def _copied(self, block_id: int) -> memoryview:
        memory = self._ring.take()
        block = self._form.block(memory)
        with self._turn:
            found = self._gathered(SliceAction.READ, (block_id,), self._own.read)  # [senders, 1, row_bytes]
            for rank, rows in zip(self._senders, found, strict=True):
                self._form.read(rows[0], block, rank)
        return memory

    def incoming(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`; any slot serves."""
        return [self._ring.take() for _ in block_ids]

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """See `BlockAccess`; as many blocks at once as a message holds."""
        form = self._form
        for first in range(0, len(arrived), form.most_rows):
            batch = arrived[first : first + form.most_rows]
            block_ids = [block_id for block_id, _ in batch]
            parts = torch.zeros((len(form.slices), len(batch), form.row_bytes), dtype=torch.uint8)
            for number, (_, memory) in enumerate(batch):
                block = form.block(host_bytes(memory))
                for rank in range(len(form.slices)):
                    form.write(block, parts[rank, number], rank)
            with self._turn:
                self._send(SliceAction.WRITE, block_ids)
                rows = self._own.rows[: len(batch)]
                self._group.scatter(parts, rows)
                self._own.write(block_ids, rows)
                self._group.gather(torch.zeros(1))  # a step may read these blocks next, on every rank

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Checksums of whole blocks, as they are now; no step in flight may write to them."""
        found: list[int] = []
        most = self._form.most_rows
        for first in range(0, len(block_ids), most):
            with self._turn:  # [senders, num_blocks]
                parts = self._gathered(SliceAction.SUMS, block_ids[first : first + most], self._own.sums)
            found += [value % (1 << 64) for value in parts.sum(0).tolist()]
        return found

    def close(self) -> None:
        """Ends the followers' servers. Later calls for a block raise RankLost. May be called twice."""
        with self._turn:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                SliceCommand(SliceAction.END).send(self._group)

    def _gathered(
        self, action: SliceAction, block_ids: Sequence[int], own: Callable[[Sequence[int]], Tensor]
    ) -> Tensor:
        """The rows of each sender, [senders, …]; the leader is the first one."""
        if self._slices is None:  # it holds all there is
            return own(block_ids)[None]
        self._send(action, block_ids)
        found = self._slices.gather(own(block_ids))
        assert found is not None
        return found

    def _send(self, action: SliceAction, block_ids: Sequence[int]) -> None:
        if self._is_closed:
            raise RankLost("this worker's group has ended")
        num_runs = 0 if self._arena is None else self._arena.num_runs
        SliceCommand(action, block_ids, num_runs).send(self._group)
