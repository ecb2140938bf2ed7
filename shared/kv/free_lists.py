"""Doubly linked lists of free blocks: removal from the middle is O(1), which a deque cannot do. Policy only."""

from __future__ import annotations


class FreeLists:
    """Lists over block ids `0 … num_blocks - 1`, each block in one of them at most.

    The lists are intrusive: two arrays of neighbours, and for each list a sentinel beyond the blocks' ids, behind which
    its head stands. A list's sentinel is its name.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_linked = 0
        """Blocks in all lists."""
        self.after: list[int] = [*range(num_blocks)]
        self.before: list[int] = [*range(num_blocks)]
        self._unused: list[int] = []  # sentinels of dropped lists

    def new(self) -> int:
        """A further list, empty."""
        if self._unused:
            return self._unused.pop()
        sentinel = len(self.after)
        self.after.append(sentinel)
        self.before.append(sentinel)
        return sentinel

    def drop(self, sentinel: int) -> None:
        """Ends an empty list; its name may be used again."""
        assert self.after[sentinel] == sentinel, "only empty lists are dropped"
        self._unused.append(sentinel)

    def is_empty(self, sentinel: int) -> bool:
        """Whether a list holds no block."""
        return self.after[sentinel] == sentinel

    def link_after(self, before: int, block_id: int) -> None:
        """Inserts a block behind `before`, a linked block or a sentinel: then it is the head."""
        after = self.after[before]
        self.after[before] = self.before[after] = block_id
        self.before[block_id] = before
        self.after[block_id] = after
        self.num_linked += 1

    def append(self, sentinel: int, block_id: int) -> None:
        """Inserts a block at the tail."""
        self.link_after(self.before[sentinel], block_id)

    def unlink(self, block_id: int) -> int | None:
        """Removes a linked block from its list; returns the list's sentinel where that is empty now."""
        before, after = self.before[block_id], self.after[block_id]
        self.after[before] = after
        self.before[after] = before
        self.num_linked -= 1
        return before if before == after else None

    def listed(self, sentinel: int) -> list[int]:
        """Block ids of one list from head to tail, bounded so that a broken link cannot loop. For checks: raises
        AssertionError where links disagree."""
        found: list[int] = []
        before, block_id = sentinel, self.after[sentinel]
        while True:
            assert self.before[block_id] == before, "free list links agree in both directions"
            if block_id == sentinel or len(found) > self.num_blocks:
                return found
            found.append(block_id)
            before, block_id = block_id, self.after[block_id]
