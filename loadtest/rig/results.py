"""One form for every benchmark's figures: a printed table, and JSON for scripts."""

from __future__ import annotations

import json
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.rig import markdown


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. Fields that do not apply are None, or not a number, and left out of the JSON."""

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
    low: float | None = None
    """Between this and `high` the ratio lies with 95 % confidence."""
    high: float | None = None
    at_least: bool | None = None
    """True where the value is a lower bound: no more could be measured."""


class Report:
    """The results of one benchmark: in its file after each addition, in a table at the end."""

    def __init__(self, out: Path | None) -> None:
        """`out` takes the JSON; None = no file."""
        self.results: list[Result] = []
        self._out = out

    def add(self, results: Iterable[Result]) -> None:
        """Writes the file anew: a run that is cut off leaves what it had."""
        self.results += results
        if self._out is not None:
            write(self._out, self.results)

    def print(self) -> None:
        """Prints the table."""
        print(table(self.results))


def machine() -> str:
    """The GPU where torch sees one, the processor, torch's version and its number of threads."""
    import torch  # imported here: the load generator's commands use this module and start faster without torch

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit() -> str:
    """The checkout's commit, with a + if files are modified; empty outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True, text=True, check=False
        )
    except OSError:  # no git
        return ""
    return described.stdout.strip()


def write(path: Path, results: Iterable[Result]) -> None:
    """Writes `{"machine": …, "commit": …, "results": […]}`."""
    rows = [{key: value for key, value in asdict(result).items() if _is_known(value)} for result in results]
    write_json(path, {"machine": machine(), "commit": commit(), "results": rows})


def write_json(path: Path, content: object) -> None:
    """Replaces the file in one step, so that a reader never sees a part of it; makes its folder. NaN is an error."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces the file in one step; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def table(results: Iterable[Result]) -> str:
    """The results as Markdown."""
    return markdown.table(
        ("", "", "limit", "of the limit", "peer", "Tandem / peer"), [_cells(result) for result in results], left=(0, 4)
    )


def verdicts(goals: Mapping[str, float], results: Iterable[Result]) -> list[str]:
    """A line for each goal, a share of the limit by a result's name, that was measured."""
    found = {result.name: result.fraction for result in results}
    lines = []
    for name, goal in goals.items():
        share = found.get(name)
        if share is not None:
            met = "met" if share >= goal else "missed"
            lines.append(f"{met}: {name}: {share:.0%} of the limit, the goal is {goal:.0%}")
    return lines


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _cells(result: Result) -> list[str]:
    return [
        result.name,
        f"{'at least ' if result.at_least else ''}{result.value:,.4g} {result.unit}",
        f"{result.limit:,.4g} {result.unit}" if result.limit is not None else "",
        f"{result.fraction:.0%}" if result.fraction is not None else "",
        result.peer or "",
        f"{result.ratio:.2f}" if result.ratio is not None else "",
    ]
