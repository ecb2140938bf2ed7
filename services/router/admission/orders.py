"""Orders within a tenant. Each is a sort key, smallest first; ties go by arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.router.admission.queue_entry import QueueEntry

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
