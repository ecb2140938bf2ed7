"""Pairs of workers whose network is cut: no hand-off goes from the one to the other for a while. Pure policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_AVOIDED_S = 15.0
"""Time that a pair is avoided after its first failure; twice as long after each failed trial, up to MAX_AVOIDED_S."""
MAX_AVOIDED_S = 240.0
"""Longest time that a pair is avoided between two trials, seconds."""
TRIAL_S = 10.0
"""One request tries the pair anew. The others avoid it until that one has succeeded or failed, or for this long."""

NO_CUTS: Mapping[str, frozenset[str]] = {}


@dataclass(slots=True)
class _Cut:
    until_s: float
    avoided_s: float
    is_tried: bool = False


class CutPairs:
    """One router's circuit breakers, one for each pair of a prefill and a decode worker that failed. Both workers keep
    serving: with others, and the decode worker by itself."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[str, str], _Cut] = {}

    def note_cut(self, prefill: str, decode: str, now_s: float) -> None:
        """A hand-off did not get from the one to the other. Those that fail with the first one change nothing."""
        known = self._cuts.get((prefill, decode))
        if known is None:
            self._cuts[prefill, decode] = _Cut(now_s + FIRST_AVOIDED_S, FIRST_AVOIDED_S)
        elif known.is_tried:
            avoided_s = min(MAX_AVOIDED_S, 2 * known.avoided_s)
            self._cuts[prefill, decode] = _Cut(now_s + avoided_s, avoided_s)

    def note_works(self, prefill: str, decode: str) -> None:
        """A hand-off has arrived: nothing is avoided any more."""
        if self._cuts:
            self._cuts.pop((prefill, decode), None)

    def note_placed(self, prefill: str, decode: str, now_s: float) -> None:
        """A request is given to the pair. After the time in which it is avoided that is the trial."""
        known = self._cuts.get((prefill, decode)) if self._cuts else None
        if known is not None:
            known.until_s, known.is_tried = now_s + TRIAL_S, True

    def avoided(self, now_s: float) -> Mapping[str, frozenset[str]]:
        """By decode worker: the prefill workers that it gets nothing from now."""
        if not self._cuts:
            return NO_CUTS
        found: dict[str, set[str]] = defaultdict(set)
        for (prefill, decode), cut in self._cuts.items():
            if now_s < cut.until_s:
                found[decode].add(prefill)
        return {decode: frozenset(prefills) for decode, prefills in found.items()}
