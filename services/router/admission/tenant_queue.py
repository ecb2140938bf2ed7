"""One tenant's part of the queue, in its order, and its position in fair queueing."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from services.router.admission.orders import Key, Order
from services.router.admission.queue_entry import QueueEntry


class TenantQueue:
    """A heap by the order's key with removal by id; a returned entry goes ahead of all others."""

    def __init__(self, order: Order) -> None:
        self.virtual = 0.0
        """Tokens started over weight: the tenant with the least has the next turn."""
        self.num_tokens = 0
        self._order = order
        self._heap: list[tuple[int, Key, int, str]] = []
        self._items: dict[str, tuple[int, Key, int, QueueEntry]] = {}
        self._ticks = count()
        self._returns = count(-1, -1)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[QueueEntry]:
        return (entry[3] for entry in self._items.values())

    def push(self, item: QueueEntry, *, front: bool) -> None:
        """Adds by the order, or with `front` ahead of all others."""
        rank, key, tick = (next(self._returns), (), 0) if front else (0, self._order(item), next(self._ticks))
        self._items[item.request_id] = (rank, key, tick, item)
        self.num_tokens += item.num_tokens
        heapq.heappush(self._heap, (rank, key, tick, item.request_id))

    def remove(self, request_id: str) -> None:
        """Removes an entry at any position."""
        self.num_tokens -= self._items.pop(request_id)[3].num_tokens

    def head(self) -> QueueEntry:
        """The next entry; the queue must not be empty."""
        while True:
            rank, key, tick, request_id = self._heap[0]
            entry = self._items.get(request_id)
            if entry is not None and entry[:3] == (rank, key, tick):
                return entry[3]
            heapq.heappop(self._heap)  # stale: it was removed, perhaps pushed again

    def num_tokens_before(self, item: QueueEntry) -> int:
        """Tokens of the entries that would go before `item` if it were pushed now."""
        key = self._order(item)
        return sum(entry[3].num_tokens for entry in self._items.values() if entry[0] < 0 or entry[1] <= key)
