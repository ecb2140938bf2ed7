"""The admission queue: bounded in requests and bytes, ordered within a tenant, fair between tenants, late-binding.

A request waits here, not at a worker, until a worker can start it. So no request sits behind a slow worker.

Fair: the next turn goes to the waiting tenant with the smallest ratio of started tokens to weight
(start-time fair queueing, Goyal et al., SIGCOMM 1996). A tenant that comes back from idle starts level with the
others: idle time earns no credit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from services.router.admission.orders import Order, fcfs
from services.router.admission.queue_entry import QueueEntry
from services.router.admission.tenant_queue import TenantQueue
from shared.errors import Overloaded

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
        self.num_bytes -= item.num_bytes
        if not self._entries:  # the busy period is over: all tenants start level
            self._queues.clear()
            self._virtual = 0.0

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
        self.num_bytes += item.num_bytes

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
