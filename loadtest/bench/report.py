"""One form for every benchmark's results: a printed table, and JSON for scripts."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. What does not apply is None and left out of the JSON."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """The most that the hardware could reach, in `unit`."""
    fraction: float | None = None
    """value / limit."""
    peer: str | None = None
    ratio: float | None = None
    """Ours over the peer's, median of pairs; above 1 is better."""


def machine() -> str:
    """The processor and how much of it torch uses."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit() -> str:
    """The checkout's commit, with a + where it has changes; empty outside a checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip()


def write(path: Path, results: list[Result]) -> None:
    """Writes `{"machine": …, "commit": …, "results": […]}`."""
    rows = [{key: value for key, value in asdict(result).items() if value is not None} for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "commit": commit(), "results": rows}, indent=1) + "\n")


def table(results: list[Result]) -> str:
    """The results as Markdown."""
    lines = ["| | | limit | of the limit | peer | ours / peer |", "| --- | ---: | ---: | ---: | --- | ---: |"]
    for r in results:
        limit = f"{r.limit:,.4g} {r.unit}" if r.limit is not None else ""
        fraction = f"{r.fraction:.0%}" if r.fraction is not None else ""
        ratio = f"{r.ratio:.2f}" if r.ratio is not None else ""
        lines.append(f"| {r.name} | {r.value:,.4g} {r.unit} | {limit} | {fraction} | {r.peer or ''} | {ratio} |")
    return "\n".join(lines)
