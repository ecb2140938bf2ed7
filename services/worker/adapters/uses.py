"""How much each adapter was used of late: what decides which of them stay where not all can."""

from __future__ import annotations

from collections import OrderedDict

HALF_LIFE = 16
"""Uses, for each adapter that there is room for, after which one counts half."""
MAX_ADAPTERS = 8192
"""Most adapters on record; the ones that were used longest ago are forgotten first."""


class Uses:
    """Counts of uses, each of which fades as others follow (LRFU: Lee et al., 2001): what is used now and then outlasts
    what was used once a moment ago, and what was much used and is no longer goes in the end."""

    def __init__(self, num_places: int) -> None:
        """`num_places`: adapters that there is room for."""
        self._fade = 0.5 ** (1.0 / (HALF_LIFE * num_places))
        self._number = 0  # of the newest use
        self._found: OrderedDict[str, tuple[float, int]] = OrderedDict()  # (count, at its last use), oldest first

    def add(self, digest: str) -> None:
        """One use more."""
        self._number += 1
        self._found[digest] = self.of(digest)[0] + 1.0, self._number
        self._found.move_to_end(digest)
        if len(self._found) > MAX_ADAPTERS:
            self._found.popitem(last=False)

    def of(self, digest: str, more: int = 0) -> tuple[float, int]:
        """(its faded uses and `more`, number of its last one), by which the least used one sorts first."""
        count, number = self._found.get(digest, (0.0, 0))
        return count * self._fade ** (self._number - number) + more, number
