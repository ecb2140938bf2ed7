"""Back-pressure from slow receivers: how much of the pool waits to be sent to each. Pure policy."""

from __future__ import annotations

from collections import Counter


class UnsentBlocks:
    """Blocks handed to the shipper and not given back, by receiver.

    A receiver that takes nothing would otherwise fill the pool with its blocks, and no other would get a prompt done.
    """

    def __init__(self, most: int) -> None:
        """Beyond `most` blocks no further prompt is started for that receiver."""
        self._most = most
        self._num_blocks: Counter[bytes] = Counter()

    def add(self, receiver: bytes, num_blocks: int) -> None:
        """Blocks were handed over."""
        if num_blocks:
            self._num_blocks[receiver] += num_blocks

    def remove(self, receiver: bytes, num_blocks: int) -> None:
        """Blocks were sent or given up."""
        self._num_blocks[receiver] -= num_blocks
        assert self._num_blocks[receiver] >= 0, "more blocks came back than were handed over"
        if not self._num_blocks[receiver]:
            del self._num_blocks[receiver]

    def is_full(self, receiver: bytes) -> bool:
        """True while prompts for this receiver have to wait."""
        return self._num_blocks[receiver] > self._most

    @property
    def total(self) -> int:
        """Over all receivers."""
        return sum(self._num_blocks.values())
