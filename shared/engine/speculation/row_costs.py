"""What rows for guesses cost and bring in a decode step; what they cost is learned from the steps that had some."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_COST, ROW_COST = 0.08, 0.03
"""Share of a step that guesses are taken to cost before any were measured: having some, and each row."""
STEPS_OF_A_CELL = 7
OLD = 192
"""Steps after which a number of rows that was not measured again loses a measurement: what a busy moment showed does
not stay for good."""
EXACT_ROWS = 16
"""Rows of a step up to which each number of rows is measured apart; larger numbers are measured in ranges."""
LEAST_GAIN = 1.03
"""Factor on a step's tokens a second from which on guesses are worth their rows: less is within what is known of
both."""


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


@dataclass(frozen=True, slots=True)
class GuessedStep:
    """A decode step that guesses may be added to."""

    num_sequences: int
    plain_s: float
    """Predicted time of the step without guesses, seconds."""
    limit_s: float
    """Longest time that the step may take, seconds."""
    factors: Sequence[float]
    """Time of the step with 0, 1, … further rows, over its time without them."""

    def took_s(self, count: int, before_s: float) -> float:
        """Seconds with that many rows more, `before_s` being spent before."""
        return self.plain_s * self.factors[count] + before_s

    def best(self, chances: Sequence[float], drafting_s: float = 0.0) -> tuple[int, float]:
        """The number of rows, the likeliest of `chances` first, with which tokens come fastest when `drafting_s` were
        spent before, and how many come in the time of a step without guesses."""
        drafting = drafting_s / self.plain_s if self.plain_s else 0.0
        best, num_tokens = 0, float(self.num_sequences)
        best_rate = num_tokens / (1.0 + drafting)
        least = LEAST_GAIN
        for count, chance in enumerate(chances[: len(self.factors) - 1], 1):
            num_tokens += chance
            if self.took_s(count, drafting_s) > self.limit_s:
                break
            rate = num_tokens / (self.factors[count] + drafting)
            if rate > least * best_rate:
                best, best_rate, least = count, rate, 1.0
        return best, best_rate

    def is_worth_a_round(
        self,
        chances: Sequence[float],
        gain: float,
        num_rows: int,
        drafting_s: float,
        round_s: float,
        least_rate: float,
    ) -> bool:
        """Whether one round more, for `num_rows` guesses of which `gain` are expected to be right, brings more tokens
        for its time than the step with `chances` does, and than `least_rate`, as `best` has it."""
        count, rate = self.best(chances, drafting_s)
        rows = count + num_rows
        if rows >= len(self.factors):
            return False
        if self.took_s(rows, drafting_s + round_s) > self.limit_s:
            return False
        longer = self.factors[rows] - self.factors[count] + round_s / self.plain_s
        return gain > max(rate, least_rate) * longer


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
