"""The admission queue: bounded, first come first served, with late binding.

A request waits here, not at a worker, until a worker can start it; so none sits behind a slow worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from shared.errors import Overloaded

T = TypeVar("T")


class AdmissionQueue(Generic[T]):
    """Entries by request id, in order of arrival; a returned entry goes to the front."""

    def __init__(self, limit: int) -> None:
        """`limit` is the most entries that may wait."""
        self.limit = limit
        self._entries: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request_id: str, entry: T) -> None:
        """Adds at the end; raises Overloaded when the queue is full."""
        if len(self._entries) >= self.limit:
            raise Overloaded(
                f"{len(self._entries)} requests wait already, the limit is {self.limit}",
                field="queue",
                limit=self.limit,
            )
        self._entries[request_id] = entry

    def push_front(self, request_id: str, entry: T) -> None:
        """Returns an entry that was admitted before: it keeps its place, also in a full queue."""
        self._entries[request_id] = entry
        self._entries.move_to_end(request_id, last=False)

    def remove(self, request_id: str) -> None:
        """Forgets an entry; unknown ids are ignored."""
        self._entries.pop(request_id, None)

    def admit(self, start: Callable[[T], bool]) -> int:
        """Offers entries from the front to `start` until it refuses one; returns how many it took.

        The head blocks those behind it: with first come first served, a large request is not starved by small ones.
        """
        count = 0
        while self._entries:
            request_id, entry = next(iter(self._entries.items()))
            if not start(entry):
                break
            # `start` may have removed it itself.
            self._entries.pop(request_id, None)
            count += 1
        return count
