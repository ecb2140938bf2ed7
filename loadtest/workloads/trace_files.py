"""Any trace of a file, by its name and content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadtest.workloads.trace import PACKED, TraceRequest
from loadtest.workloads.trace_csv import read_csv_trace
from loadtest.workloads.trace_json import read_json_trace


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """CSV where the name ends in .csv or .csv.gz, else JSON lines. Raises ConfigError with the line's number."""
    return read_csv_trace(path) if path.name.removesuffix(PACKED).endswith(".csv") else read_json_trace(path)
