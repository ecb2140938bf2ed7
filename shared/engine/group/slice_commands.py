"""What a leader asks of its followers' pools: a short message before rows of blocks pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from shared.collectives.interface import Collectives
from shared.engine.group.own_slices import MOST_ROWS

_HEAD = 3


class SliceAction(IntEnum):
    """What follows the command."""

    END = 0
    """Nothing."""
    READ = 1
    """The senders' rows are gathered."""
    WRITE = 2
    """Rows are scattered to all ranks; each answers when it has stored its own."""
    SUMS = 3
    """The senders' parts of checksums are gathered."""


@dataclass(frozen=True, slots=True)
class SliceCommand:
    """One command; at most MOST_ROWS blocks."""

    action: SliceAction
    block_ids: Sequence[int] = ()
    num_runs: int = 0
    """Plans with host copies that went before: a follower obeys when it has begun theirs."""

    def send(self, blocks: Collectives) -> None:
        """From the leader to all. Raises RankLost."""
        frame = [int(self.action), self.num_runs, len(self.block_ids), *self.block_ids]
        blocks.broadcast(torch.tensor(frame + [0] * (_HEAD + MOST_ROWS - len(frame)), dtype=torch.int64))

    @classmethod
    def receive(cls, blocks: Collectives) -> SliceCommand:
        """Waits for the next one. Raises RankLost."""
        frame = torch.zeros(_HEAD + MOST_ROWS, dtype=torch.int64)
        blocks.broadcast(frame)
        action, num_runs, count, *block_ids = frame.tolist()
        return cls(SliceAction(action), tuple(block_ids[:count]), num_runs)
