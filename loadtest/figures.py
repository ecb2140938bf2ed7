"""One format for every benchmark's figures: a printed table, and JSON for scripts."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest import markdown


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. Fields that do not apply are None and left out of the JSON."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """The hardware's limit, in `unit`."""
    fraction: float | None = None
    """value / limit."""
    peer: str | None = None
    ratio: float | None = None
    """Tandem's figure over the peer's, median of pairs; above 1 is better."""


def machine() -> str:
    """The processor, torch's version and its number of threads."""
    import torch  # imported here: the load generator's commands use this module and start faster without torch

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit() -> str:
    """The checkout's commit, with a + if files are modified; empty outside a checkout."""
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
    return markdown.table(
        ("", "", "limit", "of the limit", "peer", "Tandem / peer"), [_cells(result) for result in results], left=(0, 4)
    )


def _cells(result: Result) -> list[str]:
    return [
        result.name,
        f"{result.value:,.4g} {result.unit}",
        f"{result.limit:,.4g} {result.unit}" if result.limit is not None else "",
        f"{result.fraction:.0%}" if result.fraction is not None else "",
        result.peer or "",
        f"{result.ratio:.2f}" if result.ratio is not None else "",
    ]
