"""Placement policies of other routers in their simplest form. Each chooses a prefill and a decode worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Protocol

from services.router.placement.views import PlacementRequest, Pool, WorkerView


class PeerPolicy(Protocol):
    """Chooses at arrival, whatever the workers' queues."""

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:
        """(prefill worker, decode worker)."""
        ...


class RoundRobin:
    """The next of each pool."""

    def __init__(self, seed: int) -> None:
        self._turns = count(seed)

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:  # noqa: ARG002 - looks at nothing
        """See `PeerPolicy`."""
        turn = next(self._turns)
        return _names(prefills)[turn % len(prefills)], _names(decodes)[turn % len(decodes)]


class LeastLoaded:
    """The fewest queued prompt tokens; the fewest requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:  # noqa: ARG002 - nor at prefixes
        """See `PeerPolicy`."""
        return (
            _least(prefills, lambda view: view.num_queued_tokens, self._random),
            _least(decodes, lambda view: view.num_requests, self._random),
        )


class SessionSticky:
    """A conversation stays on the workers of its first turn, which are the least loaded then."""

    def __init__(self, seed: int) -> None:
        self._first = LeastLoaded(seed)
        self._homes: dict[str, tuple[str, str]] = {}

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:
        """See `PeerPolicy`."""
        home = self._homes.get(need.session)
        if home is None:
            home = self._homes[need.session] = self._first.choose(need, prefills, decodes)
        return home


class PrefixAware:
    """The least cost in tokens: what is queued and what the prompt adds, its cached prefix taken off.

    The form that KV-aware routers use: overlap and load in one sum, with the exact index and exact queue lengths.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:
        """See `PeerPolicy`."""

        def prefill_cost(view: WorkerView) -> float:
            return view.num_queued_tokens + need.num_uncached_tokens(view.name)

        def decode_cost(view: WorkerView) -> float:
            used = (view.num_total_blocks - view.num_free_blocks) * need.block_size
            return used + need.num_uncached_tokens(view.name)

        return _least(prefills, prefill_cost, self._random), _least(decodes, decode_cost, self._random)


PEERS: dict[str, Callable[[int], PeerPolicy]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session-sticky": SessionSticky,
    "prefix-aware": PrefixAware,
}


def _names(pool: Pool) -> list[str]:
    return [view.name for view in pool]


def _least(pool: Pool, cost: Callable[[WorkerView], float], rng: random.Random) -> str:
    costs = [(cost(view), view.name) for view in pool]
    least = min(costs)[0]
    return rng.choice([name for value, name in costs if value == least])
