"""Cuts an answer's text at a stop string, wherever the pieces of that text end."""

from __future__ import annotations

from collections.abc import Sequence


def _failure_table(pattern: str) -> tuple[int, ...]:
    """For each length 0..len(pattern): the longest proper prefix of that prefix which is also its suffix."""
    table = [0] * (len(pattern) + 1)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length]
        if pattern[i] == pattern[length]:
            length += 1
        table[i + 1] = length
    return tuple(table)


class StopStrings:
    """Passes text through until one of `stops` is complete in it; `push` costs O(characters · stops).

    The rule does not depend on how the text was cut into pieces: read one character at a time, the first stop string to
    be complete ends the text, and of several complete at the same character the longest. One Knuth-Morris-Pratt
    automaton a stop string gives that in one pass: its state is the length of the longest text suffix that begins the
    stop string, so the longest state of all is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tables = tuple(_failure_table(stop) for stop in stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece; returns (text that is certain by now, the stop string that ended it or None).

        With `may_stop` False a stop string that this piece completes is ordinary text. After a match the
        object is used up.
        """
        if not self._held and self._first.isdisjoint(text):
            return text, None
        pending = self._held + text
        num_held = len(self._held)
        for i, character in enumerate(text):
            matched = self._advance(character)
            if matched is not None and may_stop:
                return pending[: num_held + i + 1 - len(matched)], matched
        num_certain = len(pending) - max(self._states)
        self._held = pending[num_certain:]
        return pending[:num_certain], None

    def flush(self) -> str:
        """The text held back, when the answer ended without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """One character through all automata; the longest stop string that it completes."""
        matched: str | None = None
        states = self._states
        for k, stop in enumerate(self._stops):
            table = self._tables[k]
            state = states[k]
            while state and stop[state] != character:
                state = table[state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if matched is None or len(stop) > len(matched):
                    matched = stop
                state = table[state]
            states[k] = state
        return matched
