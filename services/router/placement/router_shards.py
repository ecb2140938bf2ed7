"""Which router takes a worker first, where several place requests in one fleet.

Their views are all a step old, so the worker that looks idle to one does so to the others, and they would meet there.
Workers say which routers are connected to them; each router deals the workers out by their names and finds, without a
word to the others, the same owner of each. Among equals it takes its own, whose queue it knows best: its own ledger is
most of it. No worker is kept from anyone, and when a router goes its workers are dealt out anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence


class Replicas:
    """Who else serves the fleet, by what the workers say. Plain data."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """All routers that some worker knows, sorted."""
        return sorted(self._counts)

    def told(self, worker: str, routers: Sequence[str]) -> bool:
        """A worker names the routers connected to it, none where there is only one; whether that changes `names`."""
        routers = tuple(routers)
        before = self._told.get(worker, ())
        if routers == before:
            return False
        num_before = set(self._counts)
        self._counts.subtract(before)
        self._counts.update(routers)
        self._counts += Counter()  # drops what nobody names any more
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
