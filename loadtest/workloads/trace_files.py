"""Any trace of a file, by its name and content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadtest.workloads.trace import PACKED, TraceRequest
from loadtest.workloads.trace_csv import read_csv_trace
from loadtest.workloads.trace_json import read_json_trace
from shared.errors import ConfigError


def read_trace(path: Path, unit: str = "") -> Iterator[TraceRequest]:
    """CSV where the name ends in .csv or .csv.gz, else JSON lines, whose timestamps' `unit` may be said: ms or s.
    Raises ConfigError with the line's number, or where a unit is said of CSV (`unit`)."""
    if not is_csv(path):
        return read_json_trace(path, unit)
    if unit:
        raise ConfigError(f"unit={unit}: the times of a trace in CSV have no unit to be said", field="unit", value=unit)
    return read_csv_trace(path)


def is_csv(path: Path) -> bool:
    """By the name, which may end in .csv.gz and be of large letters."""
    return path.name.lower().removesuffix(PACKED).endswith(".csv")
