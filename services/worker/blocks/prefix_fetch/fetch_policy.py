"""Whether fetching a prefix pays, from which sources, and how long a request is held for it. Policy only: plain
numbers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from typing import Literal

Mode = Literal["auto", "always", "never"]

UNKNOWN_HOLD_S = 0.25
"""How long a request is held before anything was measured."""
HOLD_SHARE = 0.25
"""How long a request is held for links of unknown speed, as a share of the time that computing the same tokens would
take."""
MARGIN = 1.5
"""A request is held for up to this many times the expected time of its fetch."""
MIN_HOLD_S = 0.01
ALWAYS_HOLD_S = 30.0
TIMEOUT_S = 5.0
"""A fetch that takes longer is given up, since it holds blocks of the pool. Longer with `always`."""
SILENCE_S = 3.0
"""A source that brings nothing for this long is given up: it stands still, or its engine does, which is asked for each
batch of blocks between two of its steps."""
SLOWEST = 8.0
"""A link this many times slower than computing is not used."""
FORGET = 0.9
"""Each time a link is passed over, its remembered cost shrinks by this factor: it is tried again some day."""
MAX_LINKS = 256
"""Links remembered; the least recently used one is forgotten first."""


class FetchPolicy:
    """Compares each link's measured rate with this worker's measured prefill rate. A link is named by its source.

    `always` waits for the fetch whatever it costs, `never` computes; both are for comparison. `auto` holds a request
    for a share of what computing would take, and lets the rest arrive while it computes.
    """

    def __init__(self, mode: Mode = "auto") -> None:
        self.mode = mode
        self._seconds_per_byte: OrderedDict[str, float] = OrderedDict()
        self._seconds_per_token = 0.0  # 0: not measured

    @property
    def enabled(self) -> bool:
        """False where no request fetches."""
        return self.mode != "never"

    @property
    def timeout_s(self) -> float:
        """Longest duration of a fetch, seconds."""
        return ALWAYS_HOLD_S if self.mode == "always" else TIMEOUT_S

    @property
    def silence_s(self) -> float:
        """Longest time without data from a source before its fetch fails, seconds."""
        return min(SILENCE_S, self.timeout_s)

    def pays(self, source: str, num_bytes: int, num_tokens: int) -> bool:
        """Whether to fetch `num_bytes`, which spare computing `num_tokens`, over this link."""
        if self.mode != "auto":
            return self.enabled
        byte_s = self._seconds_per_byte.get(source, 0.0)
        if not self._seconds_per_token or num_bytes * byte_s <= SLOWEST * num_tokens * self._seconds_per_token:
            return True
        self._seconds_per_byte[source] = byte_s * FORGET
        return False

    def hold_s(self, num_bytes: Mapping[str, int], num_tokens: int) -> float:
        """How long to hold a request for a fetch of `num_bytes` by source, all at once, that spares `num_tokens`.

        Long enough for all of it where that is sooner than computing: to compute beside it could win at most a half of
        that, slows the fetch where both share a machine, and takes from other prompts what need not be computed at all.
        Hardly at all where it is slower, and computing from the front meanwhile is better.
        """
        if self.mode == "always":
            return ALWAYS_HOLD_S
        if not self._seconds_per_token:
            return UNKNOWN_HOLD_S
        compute_s = num_tokens * self._seconds_per_token
        if any(source not in self._seconds_per_byte for source in num_bytes):
            return max(MIN_HOLD_S, HOLD_SHARE * compute_s)
        expected_s = max(size * self._seconds_per_byte[source] for source, size in num_bytes.items())
        worth_s = min(compute_s, self.timeout_s)
        return max(MIN_HOLD_S, MARGIN * expected_s) if MARGIN * expected_s <= worth_s else MIN_HOLD_S

    def note_fetch(self, source: str, num_bytes: int, seconds: float) -> None:
        """Learns from a fetch over this link."""
        if num_bytes:
            before = self._seconds_per_byte.pop(source, 0.0)
            self._seconds_per_byte[source] = _mean(before, seconds / num_bytes)
            if len(self._seconds_per_byte) > MAX_LINKS:
                self._seconds_per_byte.popitem(last=False)

    def note_compute(self, num_tokens: int, seconds: float) -> None:
        """Learns from a computed prompt."""
        if num_tokens:
            self._seconds_per_token = _mean(self._seconds_per_token, seconds / num_tokens)


def _mean(before: float, now: float) -> float:
    """Mean of the previous estimate and the newest value."""
    return (before + now) / 2 if before else now


PIECE_BLOCKS = 16
"""Neighbouring blocks that come from the same peer."""


def plan_fetch(
    missing: Iterable[int], peers: Mapping[str, Set[int]], stores: Mapping[str, Set[int]]
) -> dict[str, list[int]]:
    """Block indexes by source, ascending, each block once; blocks that no source has are left out.

    Pools of peers come before store nodes, as in the router's score: memory before what may be a disk. Where several
    peers hold a block, whole pieces of a chain go to the one that has the least to send, so that all of them send at
    once.

    `peers` and `stores` say which of the blocks each source has.
    """
    plan: dict[str, list[int]] = {source: [] for source in (*peers, *stores)}
    piece, last = -1, ""
    for index in sorted(missing, reverse=True):
        if index // PIECE_BLOCKS != piece:
            piece, last = index // PIECE_BLOCKS, ""
        holders = [peer for peer in peers if index in peers[peer]] or [node for node in stores if index in stores[node]]
        if not holders:
            continue
        if last not in holders:
            last = min(holders, key=lambda source: len(plan[source]))
        plan[last].append(index)
    return {source: indexes[::-1] for source, indexes in plan.items() if indexes}
