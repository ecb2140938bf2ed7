"""The admission queue: bounded in requests and bytes, ordered within a tenant, fair between tenants, late-binding.

A request waits here, not at a worker, until a worker can start it. So no request sits behind a slow worker.

Fair: the next turn goes to the waiting tenant with the smallest ratio of started tokens to weight
(start-time fair queueing, Goyal et al., SIGCOMM 1996). A tenant that comes back from idle starts level with the
others: idle time earns no credit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from shared.errors import Overloaded

BYTES_PER_TOKEN = 40
"""Memory of one waiting prompt token in this process: a tuple's slot and an int."""


class QueueEntry(NamedTuple):
    """One request on its way into the queue. Times are seconds of one clock."""

    request_id: str
    num_tokens: int
    """Prompt tokens to compute on any worker: known prefix hits are subtracted."""
    arrived_s: float = 0.0
    deadline_s: float = math.inf
    """Deadline of its first token."""
    priority: int = 0
    """Higher goes first under the order `priority`."""
    tenant: str = "default"
    num_bytes: int = 0
    """Memory that it holds while it waits."""
    num_pairs: float = 0.0
    """Pairs of a token to compute and one that it attends to; see `Work`."""


Key = tuple[float, ...]
Order = Callable[[QueueEntry], Key]


def fcfs(item: QueueEntry) -> Key:
    """First come, first served: `arrived`."""
    return (item.arrived_s,)


def shortest(item: QueueEntry) -> Key:
    """Fewest tokens to compute first: `tokens, arrived`. Shortest mean wait; long prompts rely on their deadline."""
    return (item.num_tokens, item.arrived_s)


def priority(item: QueueEntry) -> Key:
    """Highest priority first, first come first served within one: `−priority, arrived`."""
    return (-item.priority, item.arrived_s)


def deadline(item: QueueEntry) -> Key:
    """Earliest TTFT deadline first: `deadline, arrived`. Below overload no order meets more deadlines."""
    return (item.deadline_s, item.arrived_s)


ORDERS: Mapping[str, Order] = {"fcfs": fcfs, "shortest": shortest, "priority": priority, "deadline": deadline}
"""By the value of the setting `order`."""

SPARE = 64
"""Removed entries that a tenant's heap may hold besides as many as wait."""


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
        if len(self._heap) > 2 * len(self._items) + SPARE:  # most were removed, behind a head that stays
            self._heap = [(rank, key, tick, item.request_id) for rank, key, tick, item in self._items.values()]
            heapq.heapify(self._heap)

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


T = TypeVar("T")


class AdmissionQueue(Generic[T]):
    """Entries by request id. Plain data: no clock, no task; the caller removes entries that have waited too long."""

    def __init__(
        self,
        limit: int,
        max_bytes: int = 1 << 40,
        order: Order = fcfs,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        """`limit` requests and `max_bytes` may wait; a tenant without a weight has 1."""
        self.limit = limit
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_tokens = 0
        """Tokens of the prompts that wait to be computed."""
        self.num_pairs = 0.0
        """Pairs of tokens of the queued prompts, see `Work`."""
        self.num_due = 0
        """Requests that wait and have a deadline."""
        self._order = order
        self._weights = dict(tenant_weights or {})
        self._queues: dict[str, TenantQueue] = {}
        self._entries: dict[str, tuple[QueueEntry, T]] = {}
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, num_bytes: int = 0) -> None:
        """Raises Overloaded when an entry of that size would break a bound."""
        if len(self._entries) >= self.limit:
            raise Overloaded(
                f"{len(self._entries)} requests are waiting, the limit is {self.limit}",
                field="queue_limit",
                limit=self.limit,
            )
        if self._entries and self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"prompts of {self.num_bytes} bytes are waiting, the limit is {self.max_bytes}",
                field="queue_limit_bytes",
                limit=self.max_bytes,
            )

    def push(self, item: QueueEntry, entry: T) -> None:
        """Adds by the order; raises Overloaded when the queue is full. The id must not be in the queue."""
        self.check(item.num_bytes)
        self._add(item, entry, front=False)

    def push_front(self, item: QueueEntry, entry: T) -> None:
        """Returns an entry that was started before: it goes ahead of its tenant's others, also in a full queue."""
        self._add(item, entry, front=True)

    def remove(self, request_id: str) -> None:
        """Forgets an entry; unknown ids are ignored."""
        found = self._entries.pop(request_id, None)
        if found is None:
            return
        item = found[0]
        waiting = self._queues[item.tenant]
        waiting.remove(request_id)
        self._count(item, -1)
        if not self._entries:  # the busy period is over: all tenants start level
            self._queues.clear()
            self._virtual = self.num_pairs = 0.0

    def admit(self, start: Callable[[T], bool]) -> int:
        """Passes the head entry to `start` again and again until it returns False; returns how many it took.

        The head blocks those behind it, so small requests cannot starve a large one. `start` must not push.
        """
        num_started = 0
        while self._entries:
            waiting = self._next_tenant()
            item = waiting.head()
            if not start(self._entries[item.request_id][1]):
                break
            waiting.virtual += max(1, item.num_tokens) / self._weight(item.tenant)
            self.remove(item.request_id)
            num_started += 1
        return num_started

    def num_tokens_ahead(self, item: QueueEntry) -> int:
        """Tokens that will be computed before `item`'s if it were pushed now: its tenant's by the order, and the other
        tenants' by their weights."""
        mine = self._queues.get(item.tenant)
        own = mine.num_tokens_before(item) if mine is not None else 0
        share = (own + item.num_tokens) / self._weight(item.tenant)
        others = sum(
            min(waiting.num_tokens, int(share * self._weight(tenant)))
            for tenant, waiting in self._queues.items()
            if tenant != item.tenant
        )
        return own + others

    def _add(self, item: QueueEntry, entry: T, *, front: bool) -> None:
        assert item.request_id not in self._entries, f"{item.request_id} is already in the queue"
        waiting = self._queues.get(item.tenant)
        if waiting is None:
            waiting = self._queues[item.tenant] = TenantQueue(self._order)
        if not waiting:
            active = [other.virtual for other in self._queues.values() if other]
            waiting.virtual = max(waiting.virtual, min(active, default=self._virtual))
            self._forget_idle(keep=item.tenant)
        waiting.push(item, front=front)
        self._entries[item.request_id] = (item, entry)
        self._count(item, 1)

    def _count(self, item: QueueEntry, sign: int) -> None:
        self.num_bytes += sign * item.num_bytes
        self.num_tokens += sign * item.num_tokens
        self.num_pairs += sign * item.num_pairs
        self.num_due += sign * (item.deadline_s < math.inf)

    def _next_tenant(self) -> TenantQueue:
        waiting = min((waiting for waiting in self._queues.values() if waiting), key=lambda waiting: waiting.virtual)
        self._virtual = max(self._virtual, waiting.virtual)
        return waiting

    def _forget_idle(self, keep: str) -> None:
        """Drops tenants without waiting requests that are not ahead of the current turn."""
        gone = [
            t for t, waiting in self._queues.items() if not waiting and waiting.virtual <= self._virtual and t != keep
        ]
        for tenant in gone:
            del self._queues[tenant]

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
