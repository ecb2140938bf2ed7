"""What `make gpu-check` has found so far: its report, and the step that is under way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.gpu_check.steps import step_figures, step_log
from loadtest.rig.results import write_json
from shared.errors import ConfigError

PASSED, FAILED, TOO_LONG, SKIPPED, CUT_OFF = "passed", "failed", "too long", "skipped", "cut off"
_MOST_STARTS = 2
"""A step that was cut off is run once more: a second time it may be what ended the call."""
_TAIL = 20_000
"""Characters of a step's output that the report keeps, the last ones."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step of the check ended."""

    name: str
    command: str
    outcome: str
    seconds: float
    exit_code: int | None
    output: str
    figures: object = None
    """The content of the step's file of figures; None where it wrote none."""
    starts: int = 1

    @property
    def is_final(self) -> bool:
        """False if another call should try again."""
        return self.outcome in (PASSED, FAILED, TOO_LONG) or (self.outcome == CUT_OFF and self.starts >= _MOST_STARTS)


@dataclass
class CheckRecord:
    """The report in its file, written anew at each change."""

    path: Path
    machine: Mapping[str, object] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    under_way: Outcome | None = None

    @classmethod
    def load(cls, path: Path) -> CheckRecord:
        """The record in that file, or an empty one. A step that was under way when its call ended was cut off; what it
        had written by then is kept. Raises ConfigError for a file that is none."""
        if not path.exists():
            return cls(path)
        try:
            content = json.loads(path.read_text())
            record = cls(path, content["machine"], {item["name"]: Outcome(**item) for item in content["steps"]})
            begun = content["under_way"] and Outcome(**content["under_way"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"out: {path} is no report of this check: {error!r}", field="out") from error
        if begun is not None:
            record.end(begun, CUT_OFF, begun.seconds, None)
        return record

    def begin(self, name: str, command: str) -> Outcome:
        """Notes that a step begins, so that a call that ends with it leaves its name."""
        before = self.outcomes.get(name)
        starts = 1 + (before.starts if before is not None and before.outcome == CUT_OFF else 0)
        self.under_way = Outcome(name, command, CUT_OFF, 0.0, None, "", starts=starts)
        self.write()
        return self.under_way

    def end(self, begun: Outcome, outcome: str, seconds: float, exit_code: int | None) -> Outcome:
        """Takes what the step printed and wrote into the report, and removes the files of both."""
        log, figures = step_log(self.path), step_figures(self.path)
        output = log.read_text(errors="replace")[-_TAIL:] if log.exists() else ""
        ended = Outcome(
            begun.name, begun.command, outcome, round(seconds, 1), exit_code, output, _read(figures), begun.starts
        )
        self.under_way = None
        self.add(ended)
        for path in (log, figures):
            path.unlink(missing_ok=True)
        return ended

    def add(self, outcome: Outcome) -> None:
        """Replaces what an earlier call found for the step."""
        self.outcomes[outcome.name] = outcome
        self.write()

    def write(self) -> None:
        """Writes the file."""
        under_way = asdict(self.under_way) if self.under_way is not None else None
        ended = [asdict(outcome) for outcome in self.outcomes.values()]
        write_json(self.path, {"machine": self.machine, "under_way": under_way, "steps": ended})


def _read(figures: Path) -> Any:
    if not figures.exists():
        return None
    try:
        return json.loads(figures.read_text())
    except ValueError as error:  # cut off by the limit
        return f"unreadable: {error}"
