"""The admission queue: bounded in requests and bytes, ordered within a tenant, fair between tenants, bound late.

A request waits here, not at a worker, until a worker can start it; so none sits behind a slow worker.

Fair: of the tenants that wait, the one that has started the fewest tokens over its weight has the next turn
(start-time fair queueing, Goyal et al., SIGCOMM 1996). A tenant that comes back from idle begins level with the others:
it has saved up nothing.
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
    """Entries by request id. Plain data: no clock, no task; the caller removes what has waited too long."""

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
                f"{len(self._entries)} requests wait already, the limit is {self.limit}",
                field="queue_limit",
                limit=self.limit,
            )
        if self._entries and self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"prompts of {self.num_bytes} bytes wait already, the limit is {self.max_bytes}",
                field="queue_limit_bytes",
                limit=self.max_bytes,
            )

    def push(self, item: QueueEntry, entry: T) -> None:
        """Adds by the order; raises Overloaded when the queue is full. The id must not wait already."""
        self.check(item.num_bytes)
        self._add(item, entry, front=False)

    def push_front(self, item: QueueEntry, entry: T) -> None:
        """Returns an entry that was started before: it goes first among its tenant's, also in a full queue."""
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
        if not self._entries:  # the busy period is over: no tenant is ahead of another
            self._queues.clear()
            self._virtual = 0.0

    def admit(self, start: Callable[[T], bool]) -> int:
        """Offers the entry whose turn it is to `start` until it refuses one; returns how many it took.

        The head blocks those behind it: a large request is not starved by small ones. `start` must not push.
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
        """Tokens that will be computed before `item`'s, were it pushed now: its tenant's by the order, and what the
        others may start meanwhile by their weights."""
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
        assert item.request_id not in self._entries, f"{item.request_id} waits already"
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
        """Tenants that do not wait and are not ahead of the turn cost no memory."""
        gone = [
            t for t, waiting in self._queues.items() if not waiting and waiting.virtual <= self._virtual and t != keep
        ]
        for tenant in gone:
            del self._queues[tenant]

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
