"""Which router takes a worker first, where several place requests in one fleet.

Their views are all a step old, so the worker that looks idle to one does so to the others, and they would meet there.
Workers report which routers are connected to them; each router assigns the workers by their names and arrives, without
talking to the others, at the same owner of each. Among equals it takes its own, whose queue it knows best: its own
ledger is most of it. Any router may still use any worker, and when a router goes its shard is assigned anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence


class Replicas:
    """The routers that serve the fleet, as the workers report them. Plain data."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """All routers that some worker knows, sorted."""
        return sorted(self._counts)

    def update_routers(self, worker: str, routers: Sequence[str]) -> bool:
        """A worker's list of connected routers, empty where there is only one; returns whether that changes `names`."""
        routers = tuple(routers)
        before = self._told.get(worker, ())
        if routers == before:
            return False
        num_before = set(self._counts)
        self._counts.subtract(before)
        self._counts.update(routers)
        self._counts += Counter()  # drops routers that no worker names any more
        if routers:
            self._told[worker] = routers
        else:
            self._told.pop(worker, None)
        return set(self._counts) != num_before


def own_workers(workers: Collection[str], router: str, routers: Sequence[str]) -> set[str]:
    """Those that `router` takes first; all of them where it is alone, or where there are fewer workers than routers."""
    if router not in routers or len(workers) < len(routers):
        return set(workers)
    first = sorted(routers).index(router)
    return set(sorted(workers)[first :: len(routers)])
