"""How much longer a decode step takes with rows for guesses: learned from the steps that had some."""

from __future__ import annotations

import statistics
from collections import deque

FIRST_COST, ROW_COST = 0.08, 0.03
"""Share of a step that guesses are taken to cost before any were measured: having some, and each row."""
STEPS_OF_A_CELL = 7
OLD = 192
"""Steps after which a number of rows that was not measured again loses a measurement: what a busy moment showed does
not stay for good."""
EXACT_ROWS = 16
"""Up to as many rows in all each number is measured by itself, then several together."""


class RowCosts:
    """Ratios of measured steps to those that are predicted without guesses, by the number of sequences and of rows."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._num_steps = 0

    def measured(self, num_sequences: int, num_guesses: int, ratio: float) -> None:
        """A step's time over that of the same sequences without guesses, as predicted; `num_guesses` may be 0."""
        self._num_steps += 1
        key = num_sequences.bit_length(), _cell_of(num_sequences + num_guesses)
        cell = self._cells.setdefault(key, _Cell())
        cell.add(ratio, self._num_steps)

    def factors(self, num_sequences: int, most: int) -> list[float]:
        """What a step of these sequences takes with 0, 1, … `most` guesses, over what it takes without."""
        kind = num_sequences.bit_length()
        plain = self._ratio(kind, num_sequences, 1.0)
        found = [1.0]
        cell, ratio = _cell_of(num_sequences), plain
        for rows in range(num_sequences + 1, num_sequences + most + 1):
            # What is not known is taken to cost a little more than one row less does.
            before = ratio + ROW_COST * plain + (FIRST_COST * plain if len(found) == 1 else 0.0)
            if _cell_of(rows) != cell:
                cell = _cell_of(rows)
                ratio = self._ratio(kind, rows, before)
            found.append(max(1.0, ratio / plain))
        return found

    def _ratio(self, kind: int, rows: int, otherwise: float) -> float:
        cell = self._cells.get((kind, _cell_of(rows)))
        return otherwise if cell is None else cell.ratio(otherwise, self._num_steps)


class _Cell:
    __slots__ = ("_last", "_median", "_ratios")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=STEPS_OF_A_CELL)
        self._median = 0.0  # of them; all of them are asked for in most steps, and one is added
        self._last = 0

    def add(self, ratio: float, step: int) -> None:
        self._ratios.append(ratio)
        self._median = statistics.median(self._ratios)
        self._last = step

    def ratio(self, otherwise: float, step: int) -> float:
        """The median, `otherwise` counting as one measurement more; what is old is dropped, one after the other."""
        while self._ratios and step - self._last > OLD:
            self._ratios.popleft()
            self._median = statistics.median(self._ratios) if self._ratios else 0.0
            self._last += OLD
        if not self._ratios:
            return otherwise
        count = len(self._ratios)
        return (count * self._median + otherwise) / (count + 1)


def _cell_of(rows: int) -> int:
    if rows <= EXACT_ROWS:
        return rows
    return EXACT_ROWS + (rows - EXACT_ROWS + 3) // 4
