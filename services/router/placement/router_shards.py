"""Which router uses a worker first, when several routers place requests in one fleet.

All their views are one step old. A worker that looks idle to one router looks idle to the others, and all would choose
it. Workers report which routers are connected to them; each router assigns workers to routers by a hash of their names
and reaches the same assignment without talking to the others. Among equals it prefers its own shard, whose queues it
knows best, because most of their work is in its own ledger. Any router may still use any worker; when a router goes,
its shard is assigned anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence


class Replicas:
    """The routers that serve the fleet, as the workers report them. Plain data."""

    def __init__(self) -> None:
        self._routers_of: dict[str, tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """All routers that any worker reports, sorted."""
        return sorted(self._counts)

    def update_routers(self, worker: str, routers: Sequence[str]) -> bool:
        """Sets a worker's connected routers, empty if there is only one; returns whether `names` changed."""
        routers = tuple(routers)
        before = self._routers_of.get(worker, ())
        if routers == before:
            return False
        num_before = set(self._counts)
        self._counts.subtract(before)
        self._counts.update(routers)
        self._counts += Counter()  # drops routers that no worker reports any more
        if routers:
            self._routers_of[worker] = routers
        else:
            self._routers_of.pop(worker, None)
        return set(self._counts) != num_before


def own_workers(workers: Collection[str], router: str, routers: Sequence[str]) -> set[str]:
    """The shard of `router`; all workers if it is alone or if there are fewer workers than routers."""
    if router not in routers or len(workers) < len(routers):
        return set(workers)
    first = sorted(routers).index(router)
    return set(sorted(workers)[first :: len(routers)])
