"""The outcomes of `make chaos` in files: a line a trial for scripts, beside it a record with the commit that was tried
and the seconds that it took. A later run goes on from them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from loadtest.chaos.trial import Outcome, Trial
from shared.errors import ConfigError

_LINE = re.compile(r"(\S+) (\S+) ([^\s:]+): (\d+)\|(\d+)\|(-?\d+)\|(\d+\.\d+) s")


@dataclass(frozen=True, slots=True)
class Row:
    """One trial's outcome, and which code it was."""

    outcome: Outcome
    commit: str = ""
    """As `loadtest.figures.commit` has it; empty where it was not recorded."""
    took_s: float = 0.0
    """Seconds from a whole cluster to a whole cluster, waits included; 0 where it was not recorded."""


class RowFile:
    """The rows in `out`, their records in a file beside it."""

    def __init__(self, out: Path) -> None:
        """Changes nothing before `clear` or `add`."""
        self._lines = out
        self._records = out.with_name(f"{out.stem}-records.jsonl")
        self.table = out.with_name(f"{out.stem}-table.md")
        """Where the table belongs."""

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
