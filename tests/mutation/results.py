"""What became of each mutant, as a file and as a page."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.rig.markdown import table
from loadtest.rig.results import write_text
from tests.mutation.forks import Outcome, Ran
from tests.mutation.mutants import Mutant

JUDGED = Path(__file__).with_name("judged.json")
"""Why survivors may live, by their change: `{"path: before -> after": "why"}`. Lines may move."""


@dataclass(frozen=True, slots=True)
class Result:
    """One mutant's end."""

    mutant: Mutant
    change: str  # "before -> after", the lines stripped
    outcome: Outcome
    failed: str  # the test that noticed
    cpu_s: float

    @property
    def name(self) -> str:
        return f"{self.mutant.path}: {self.change}"


def result(mutant: Mutant, root: Path, text: str, ran: Ran) -> Result:
    """Of a run with the mutant's text in place."""
    return Result(mutant, change((root / mutant.path).read_text(), text), ran.outcome, ran.failed, round(ran.cpu_s, 2))


def change(before: str, after: str) -> str:
    """The lines that differ."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    old = " / ".join(line[2:].strip() for line in lines if line.startswith("- "))
    new = " / ".join(line[2:].strip() for line in lines if line.startswith("+ "))
    return f"{old} -> {new}"


def save(results: list[Result], path: Path) -> None:
    """One JSON object a line."""
    write_text(path, "".join(json.dumps(asdict(each)) + "\n" for each in results))


def load(path: Path) -> list[Result]:
    """Inverse of `save`."""
    found = []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        mutant, outcome = Mutant(**fields.pop("mutant")), Outcome(fields.pop("outcome"))
        found.append(Result(mutant=mutant, outcome=outcome, **fields))
    return found


def page(results: list[Result], judged: dict[str, str]) -> str:
    """Markdown: the score of each target, then each survivor with why it may live."""
    names = dict.fromkeys(each.mutant.target for each in results)
    rows = [_row(name, [each for each in results if each.mutant.target == name]) for name in names]
    columns = ("target", "mutants", "a test fails", "cannot be imported", "endless", "survive", "score")
    counts = table(columns, [*rows, _row("**all**", results)], left=range(len(columns)))
    lines = [counts, "", f"Score: {score(results):.1%} of {len(results)} mutants.", "", "## Survivors"]
    for each in results:
        if each.outcome is Outcome.SURVIVED:
            why = judged.get(each.name, "not judged yet")
            lines.append(f"- `{each.mutant.path}:{each.mutant.line}` `{each.change}`: {why}")
    return "\n".join(lines) + "\n"


def score(results: list[Result]) -> float:
    """The share of mutants that do not survive."""
    return 1 - sum(each.outcome is Outcome.SURVIVED for each in results) / max(1, len(results))


def _row(name: str, results: list[Result]) -> list[str]:
    counts = Counter(each.outcome for each in results)
    numbers = [len(results), *(counts[outcome] for outcome in Outcome)]
    return [name, *map(str, numbers), f"{score(results):.1%}"]
