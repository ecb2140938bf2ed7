"""Traces in CSV: times and lengths, without prefix structure.

Azure's of its LLM inference and what Splitwise's simulator plays (Patel et al., 2024), and BurstGPT's (Wang et al.,
2024), told apart by the columns that they have, in any order and among others.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from loadtest.workloads.trace import LATEST_S, RisingTimes, TraceRequest, open_trace, trace_error

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")
SPLITWISE = ("arrival_timestamp", "prompt_size", "token_size")
FORMATS = {"Azure": AZURE, "BurstGPT": BURST_GPT, "Splitwise": SPLITWISE}
"""The columns that are read of each: time, tokens of the prompt, tokens of the answer."""

_MOST_DIGITS = 15
_SHOWN = 40
"""Characters of a wrong cell that the error has."""
_LINE_SHOWN = 80

Times = Callable[[str], float | str]
"""A cell's time as seconds, or what is wrong with it."""


def read_csv_trace(path: Path) -> Iterator[TraceRequest]:
    """Requests in the file's order, times relative to the first; raises ConfigError with the line's number.

    Failed requests of BurstGPT, which have an answer of 0 tokens, are left out.
    """
    lines = open_trace(path)
    number, line = next(lines, (1, ""))
    header = tuple(cell.strip() for cell in _cells(line, path, number))
    known = _format_of(header, line, path, number)
    seconds: Times = _Dates() if known is AZURE else _seconds
    at_column, prompt_column, answer_column = (header.index(name) for name in known)
    times = RisingTimes(path, known[0])
    for number, line in lines:
        cells = _cells(line, path, number)
        if len(cells) != len(header):
            raise trace_error(path, number, f"expected {len(header)} columns, got {len(cells)}")
        if known is BURST_GPT and cells[answer_column].strip() == "0":
            continue
        cell = cells[at_column].strip()
        at_s = seconds(cell)
        if isinstance(at_s, str):
            raise trace_error(path, number, f"{known[0]} {at_s}")
        yield TraceRequest(
            times.relative_s(at_s, cell, number),
            _count(cells[prompt_column], known[1], path, number),
            _count(cells[answer_column], known[2], path, number),
        )


def _format_of(header: Sequence[str], line: str, path: Path, number: int) -> tuple[str, str, str]:
    """One of FORMATS; raises ConfigError where the header has the columns of none, or one of them twice."""
    known = next((columns for columns in FORMATS.values() if set(columns) <= set(header)), None)
    if known is None:
        formats = "; ".join(f"{name}'s {', '.join(columns)}" for name, columns in FORMATS.items())
        found = line.strip()[:_LINE_SHOWN]
        raise trace_error(path, number, f"expected a header with the columns of one of {formats}; got {found!r}")
    twice = next((name for name in known if header.count(name) > 1), None)
    if twice is not None:
        raise trace_error(path, number, f"the header has the column {twice} twice")
    return known


class _Dates:
    """Dates and times, from the first one on."""

    def __init__(self) -> None:
        self._first: datetime | None = None

    def __call__(self, cell: str) -> float | str:
        try:
            at = datetime.fromisoformat(cell)
        except ValueError:
            return f"must be a date and time, got {cell[:_SHOWN]!r}"
        first = self._first = self._first or at
        if (at.tzinfo is None) != (first.tzinfo is None):
            return f"{cell} and the first one: only one of them has a time zone"
        return (at - first).total_seconds()


def _seconds(cell: str) -> float | str:
    try:
        at_s = float(cell)
    except ValueError:
        at_s = math.nan
    return at_s if 0 <= at_s <= LATEST_S else f"must be seconds from 0 to {LATEST_S:g}, got {cell[:_SHOWN]!r}"


def _cells(line: str, path: Path, number: int) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")], strict=True), [])
    except csv.Error as error:
        raise trace_error(path, number, f"not CSV: {error}") from error


def _count(cell: str, name: str, path: Path, number: int) -> int:
    digits = cell.strip()
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS or int(digits) < 1:
        raise trace_error(path, number, f"{name} must be a whole number of at least 1, got {cell[:_SHOWN]!r}")
    return int(digits)
