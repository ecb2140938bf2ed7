"""The Azure LLM inference trace's format: CSV of times and lengths, without prefix structure (Patel et al., 2024)."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from loadtest.workloads.trace import TraceRequest, open_trace, trace_error

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_MOST_DIGITS = 15
_SHOWN = 40
"""Characters of a wrong cell that the error has."""
_LINE_SHOWN = 80


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """Requests in the file's order, times relative to the first; raises ConfigError with the line's number."""
    lines = open_trace(path)
    number, line = next(lines, (1, ""))
    if tuple(cell.strip() for cell in _cells(line, path, number)) != HEADER:
        found = line.strip()[:_LINE_SHOWN]
        raise trace_error(path, number, f"expected the header {','.join(HEADER)}, got {found!r}")
    first: datetime | None = None
    last_s = -math.inf
    for number, line in lines:
        cells = _cells(line, path, number)
        if len(cells) != len(HEADER):
            raise trace_error(path, number, f"expected {len(HEADER)} columns, got {len(cells)}")
        try:
            at = datetime.fromisoformat(cells[0].strip())
        except ValueError:
            raise trace_error(path, number, f"TIMESTAMP must be a date and time, got {cells[0]!r}") from None
        first = first or at
        if (at.tzinfo is None) != (first.tzinfo is None):
            raise trace_error(path, number, f"TIMESTAMP {cells[0]} and the first one: only one of them has a time zone")
        at_s = (at - first).total_seconds()
        if at_s < last_s or at_s < 0:
            raise trace_error(path, number, f"TIMESTAMP {cells[0]} goes back in time")
        last_s = at_s
        yield TraceRequest(at_s, _count(cells[1], HEADER[1], path, number), _count(cells[2], HEADER[2], path, number))


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
