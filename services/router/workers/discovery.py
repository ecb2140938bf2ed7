"""Which workers there are: the interface, and the fixed list of the flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shared.errors import ConfigError
from shared.identity import DECODE, PREFILL, Roles


@dataclass(frozen=True, slots=True)
class DiscoveredWorker:
    """A worker that the router should be connected to. One that differs in any field is another worker."""

    name: str
    roles: Roles
    """In which the router uses it."""
    address: str  # host:port
    label: tuple[str, ...] = ()
    """Where it stands, widest first: ("zone-a", "rack-3", "nvlink-1"). Empty: unknown."""


class Discovery(Protocol):
    """A view of the workers that may change at run time. `Fleet` connects to the workers in it.

    Concurrency: used from the event loop's thread alone; no method blocks it.
    Failure: no method raises for a source that is gone or wrong. The last good view stays, and `failure` says why it
    may be out of date.
    """

    @property
    def workers(self) -> tuple[DiscoveredWorker, ...]:
        """The last good view, names unique; empty before the first one. Each change is a new tuple."""
        ...

    @property
    def failure(self) -> str:
        """Why `workers` may be out of date, for people; empty while it is the source's present content."""
        ...

    def start(self, on_change: Callable[[], None]) -> None:
        """Begins to watch; does not wait for the first view. From now until `close`, `on_change` is called after each
        change of `workers`; `workers` may have a view already when this returns, without a call. Called once."""
        ...

    async def close(self) -> None:
        """Ends the watch: `on_change` is not called any more, `workers` stays as it is. Twice is fine."""
        ...


class StaticDiscovery:
    """A list that never changes."""

    def __init__(self, workers: Iterable[DiscoveredWorker]) -> None:
        """Raises ConfigError where a name stands twice."""
        self._workers = tuple(workers)
        check_names(self._workers)

    @classmethod
    def of(
        cls,
        prefills: Mapping[str, str],
        decodes: Mapping[str, str],
        labels: Mapping[str, tuple[str, ...]] | None = None,
    ) -> StaticDiscovery:
        """The workers of host:port by name, with the labels of some of the names. A worker in both pools, at one
        address, has both roles; raises ConfigError for a name with two addresses."""
        where = labels or {}
        found: dict[tuple[str, str], Roles] = {}
        for roles, pool in ((PREFILL, prefills), (DECODE, decodes)):
            for place in pool.items():
                found[place] = found.get(place, roles) | roles
        return cls(
            DiscoveredWorker(name, roles, address, where.get(name, ())) for (name, address), roles in found.items()
        )

    @property
    def workers(self) -> tuple[DiscoveredWorker, ...]:
        """The list."""
        return self._workers

    @property
    def failure(self) -> str:
        """Never one."""
        return ""

    def start(self, on_change: Callable[[], None]) -> None:
        """Has nothing to watch."""

    async def close(self) -> None:
        """Has nothing to end."""


def check_names(workers: Iterable[DiscoveredWorker]) -> None:
    """Raises ConfigError where two workers have one name, of one role or of both."""
    counts = Counter(worker.name for worker in workers)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(f"worker {twice[0]!r} is named twice", field="workers", value=twice[0])
