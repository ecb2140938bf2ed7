"""How many connections are open, in all and from each address."""

from __future__ import annotations

from collections import Counter

from services.router.edge.limits import LimitSettings
from shared.errors import Overloaded


class Connections:
    """Open connections of one server, by client address."""

    def __init__(self, limits: LimitSettings) -> None:
        self._max = limits.max_connections
        self._max_per_client = limits.max_connections_per_client
        self._by_client: Counter[str] = Counter()
        self._num_open = 0

    def open(self, client: str) -> Overloaded | None:
        """Counts a connection in; returns why it is refused where it is one too many. `close` it either way."""
        self._num_open += 1
        self._by_client[client] += 1
        if self._num_open > self._max:
            return Overloaded(f"more than {self._max} connections are open", field="connections", limit=self._max)
        if 0 < self._max_per_client < self._by_client[client]:
            return Overloaded(
                f"more than {self._max_per_client} connections from {client} are open",
                field="connections",
                limit=self._max_per_client,
            )
        return None

    def close(self, client: str) -> None:
        """Counts it out."""
        self._num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]
