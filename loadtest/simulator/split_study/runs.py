"""Runs of this and of earlier studies, one JSON line each, so that none is run twice and a study may be cut off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from loadtest.simulator.simulation import AUTO
from loadtest.simulator.split_study.systems import Run, System

Key = Mapping[str, Any]
"""What a run was of, without its system: workers, workload, targets, rate and so on."""


@dataclass
class Runs:
    """Runs of a file. Fixed systems count whatever commit they were run at; mode auto only at this one, and never
    with modified files. Several processes may add to one file."""

    path: Path | None = None
    """None: nothing is kept."""
    commit: str = ""
    """Commit of the code; with a + where files are modified."""

    def find(self, key: Key, system: System) -> Run | None:
        """None where there is no such run."""
        row = self._rows.get(self._text(key, system.name))
        return None if row is None else Run(**{name: row[name] for name in Run._fields})

    def add(self, key: Key, system: System, run: Run) -> None:
        """Appends a run to the file at once, as a line."""
        self._add({**key, "system": system.name, "commit": self.commit, **run._asdict()})

    def capacity(self, key: Key) -> tuple[float, list[System]] | None:
        """What `add_capacity` kept."""
        row = self._rows.get(self._text(key, ""))
        return None if row is None else (row["capacity"], [System(*start) for start in row["starts"]])

    def add_capacity(self, key: Key, rate: float, starts: list[System]) -> None:
        """Up to which rate the best fixed system serves, and where its search ended: see `search.capacity`."""
        self._add({**key, "system": "", "commit": self.commit, "capacity": rate, "starts": starts})

    @cached_property
    def _rows(self) -> dict[str, dict[str, Any]]:
        if self.path is None or not self.path.exists():
            return {}
        rows = map(json.loads, self.path.read_text().splitlines())
        return {
            self._text(row, row["system"], row["commit"]): row
            for row in rows
            if row["system"] != AUTO or (row["commit"] and not row["commit"].endswith("+"))
        }

    def _add(self, row: dict[str, Any]) -> None:
        self._rows[self._text(row, row["system"], row["commit"])] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _text(self, key: Key, system: str, at_commit: str | None = None) -> str:
        """A text that is the same for two runs of the same load, system and, in mode auto, commit."""
        code = (self.commit if at_commit is None else at_commit) if system == AUTO else ""
        return "/".join([*(str(key.get(name, "")) for name in KEY), system, code])


KEY = ("workers", "seed", "workload", "targets", "rate", "seconds", "lives")
