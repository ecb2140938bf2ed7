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
from services.router.admission.tenant_queue import TenantQueue
from services.router.admission.waiting import Waiting
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
        self._lines: dict[str, TenantQueue] = {}
        self._entries: dict[str, tuple[Waiting, T]] = {}
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

    def push(self, item: Waiting, entry: T) -> None:
        """Adds by the order; raises Overloaded when the queue is full. The id must not wait already."""
        self.check(item.num_bytes)
        self._add(item, entry, front=False)

    def push_front(self, item: Waiting, entry: T) -> None:
        """Returns an entry that was started before: it goes first among its tenant's, also in a full queue."""
        self._add(item, entry, front=True)

    def remove(self, request_id: str) -> None:
        """Forgets an entry; unknown ids are ignored."""
        found = self._entries.pop(request_id, None)
        if found is None:
            return
        item = found[0]
        line = self._lines[item.tenant]
        line.remove(request_id)
        self.num_bytes -= item.num_bytes
        if not self._entries:  # the busy period is over: nobody is ahead of anybody
            self._lines.clear()
            self._virtual = 0.0

    def admit(self, start: Callable[[T], bool]) -> int:
        """Offers the entry whose turn it is to `start` until it refuses one; returns how many it took.

        The head blocks those behind it: a large request is not starved by small ones. `start` must not push.
        """
        num_started = 0
        while self._entries:
            line = self._next_line()
            item = line.head()
            if not start(self._entries[item.request_id][1]):
                break
            line.virtual += max(1, item.num_tokens) / self._weight(item.tenant)
            self.remove(item.request_id)
            num_started += 1
        return num_started

    def num_tokens_ahead(self, item: Waiting) -> int:
        """Tokens that will be computed before `item`'s, were it pushed now: its tenant's by the order, and what the
        others may start meanwhile by their weights."""
        mine = self._lines.get(item.tenant)
        own = mine.num_tokens_before(item) if mine is not None else 0
        share = (own + item.num_tokens) / self._weight(item.tenant)
        others = sum(
            min(line.num_tokens, int(share * self._weight(tenant)))
            for tenant, line in self._lines.items()
            if tenant != item.tenant
        )
        return own + others

    def _add(self, item: Waiting, entry: T, *, front: bool) -> None:
        assert item.request_id not in self._entries, f"{item.request_id} waits already"
        line = self._lines.get(item.tenant)
        if line is None:
            line = self._lines[item.tenant] = TenantQueue(self._order)
        if not line:
            active = [other.virtual for other in self._lines.values() if other]
            line.virtual = max(line.virtual, min(active, default=self._virtual))
            self._forget_idle(keep=item.tenant)
        line.push(item, front=front)
        self._entries[item.request_id] = (item, entry)
        self.num_bytes += item.num_bytes

    def _next_line(self) -> TenantQueue:
        line = min((line for line in self._lines.values() if line), key=lambda line: line.virtual)
        self._virtual = max(self._virtual, line.virtual)
        return line

    def _forget_idle(self, keep: str) -> None:
        """Tenants that do not wait and are not ahead of the turn cost no memory."""
        gone = [t for t, line in self._lines.items() if not line and line.virtual <= self._virtual and t != keep]
        for tenant in gone:
            del self._lines[tenant]

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
