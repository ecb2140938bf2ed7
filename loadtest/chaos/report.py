"""The outcomes as one table in Markdown."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from string import ascii_lowercase

from loadtest.chaos import adapters
from loadtest.chaos.trial import PHASES, Outcome, Trial
from loadtest.rig.markdown import bold, table
from shared.errors import ConfigError

_LINE = re.compile(r"(\S+) (\S+) ([^\s:]+): (\d+)\|(\d+)\|(-?\d+)\|(\d+\.\d+) s")


@dataclass(frozen=True, slots=True)
class Row:
    """One trial's outcome, and which code it was."""

    outcome: Outcome
    commit: str = ""
    """As `loadtest.rig.results.commit` has it; empty where it was not recorded."""
    took_s: float = 0.0
    """Seconds from a whole cluster to a whole cluster, waits included; 0 where it was not recorded."""


class RowFile:
    """The rows in `out`, their records in a file beside it."""

    def __init__(self, out: Path) -> None:
        """Changes nothing before `clear` or `add`."""
        self._lines = out
        self._records = out.with_name(f"{out.stem}-records.jsonl")
        self.table = out.with_name(f"{out.stem}-table.md")
        """The table's file."""

    def clear(self) -> None:
        """No rows."""
        self._lines.parent.mkdir(parents=True, exist_ok=True)
        self._lines.write_text("")
        self._records.write_text("")

    def rows(self) -> list[Row]:
        """One for each trial that has a line, its last one. A line without a record has no commit and no note. Raises
        ConfigError for a line that is none of ours."""
        found = {row.outcome.trial: row for row in map(self._row, self._read(self._lines))}
        for record in map(json.loads, self._read(self._records)):
            trial = Trial(record["victim"], record["fault"], record["phase"])
            if trial in found and str(found[trial].outcome) == record["line"]:
                outcome = _outcome(record["line"], record["note"])
                found[trial] = Row(outcome, record["commit"], record["took_s"])
        return list(found.values())

    def add(self, row: Row) -> None:
        """Appends it at once: a run that is ended loses no trial."""
        outcome = row.outcome
        record = {
            "victim": outcome.trial.victim,
            "fault": outcome.trial.fault,
            "phase": outcome.trial.phase,
            "line": str(outcome),
            "note": outcome.note,
            "commit": row.commit,
            "took_s": round(row.took_s, 1),
        }
        self._lines.parent.mkdir(parents=True, exist_ok=True)
        for path, text in ((self._lines, str(outcome)), (self._records, json.dumps(record))):
            with path.open("a") as file:
                file.write(f"{text}\n")

    def _row(self, line: str) -> Row:
        try:
            return Row(_outcome(line, ""))
        except ValueError as error:
            raise ConfigError(f"{self._lines}: {line[:80]!r} is no trial's line", field="out", value=line) from error

    @staticmethod
    def _read(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []


def _outcome(line: str, note: str) -> Outcome:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(line)
    victim, fault, phase, lost, wrong, leaked, pause = found.groups()
    return Outcome(Trial(victim, fault, phase), int(lost), int(wrong), int(leaked), float(pause), note)


def summary(rows: Sequence[Row]) -> str:
    """A line for each victim and fault, a column a phase; what is more than a pause stands out, and so does a row that
    is of another commit than most."""
    outcomes = [row.outcome for row in rows]
    lines = dict.fromkeys((outcome.trial.victim, outcome.trial.fault) for outcome in outcomes)
    found = {(row.outcome.trial.victim, row.outcome.trial.fault, row.outcome.trial.phase): row for row in rows}
    marks = _marks(rows)
    phases = [phase for phase in (*PHASES, *adapters.PHASES) if any(row.outcome.trial.phase == phase for row in rows)]
    cells = [[*line, *(_cell(found.get((*line, phase)), marks) for phase in phases)] for line in lines]
    num_good = sum(outcome.good for outcome in outcomes)
    return "\n".join(
        (
            table(("victim", "fault", *phases), cells, left=(0, 1)),
            "",
            "Each cell: streams lost, streams with a wrong token, KV blocks leaked, longest pause of a client. "
            f"{num_good} of {len(outcomes)} trials cost no more than a pause.",
            *_commits(rows, marks),
            *_notes(outcomes),
            *_seconds(rows),
        )
    )


def _marks(rows: Iterable[Row]) -> Mapping[str, str]:
    """A mark for each commit: none for the one of most rows."""
    counts = Counter(row.commit for row in rows).most_common()
    letters = [f"({letter})" for letter in ascii_lowercase]
    return {commit: mark for (commit, _), mark in zip(counts, ["", *letters, *("(…)" for _ in counts)], strict=False)}


def _cell(row: Row | None, marks: Mapping[str, str]) -> str:
    if row is None:
        return ""
    outcome = row.outcome
    text = f"{outcome.lost} / {outcome.wrong} / {outcome.leaked} / {outcome.longest_pause_s:.1f} s"
    return " ".join(filter(None, (bold(text, not outcome.good), marks[row.commit])))


def _commits(rows: Sequence[Row], marks: Mapping[str, str]) -> list[str]:
    counts = Counter(row.commit for row in rows)
    named = [
        f"- {' '.join(filter(None, (mark, commit or 'commit not recorded')))}: {counts[commit]} trials"
        for commit, mark in marks.items()
    ]
    return ["", "Code, by commit (+: with changes that are in no commit):", "", *named] if any(counts) else []


def _notes(outcomes: Iterable[Outcome]) -> list[str]:
    noted = [f"- {outcome.trial}: {outcome.note}" for outcome in outcomes if outcome.note]
    return ["", *noted] if noted else []


def _seconds(rows: Iterable[Row]) -> list[str]:
    taken: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.took_s:
            taken[row.outcome.trial.fault].append(row.took_s)
    said = ", ".join(f"{fault} {median(times):.0f}" for fault, times in taken.items())
    return ["", f"Seconds a trial, median: {said}."] if said else []
