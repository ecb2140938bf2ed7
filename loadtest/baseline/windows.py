"""Windows, the units of a study: one system under some dozens of requests; and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from loadtest.baseline.calibration import Capacity
from loadtest.metrics import inter_token_s, is_good, request_metrics
from loadtest.run import RunResult
from loadtest.slo import Slo
from loadtest.summary import invalid_reasons
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """The results of one system's turn in one round. Every offered request counts, in the order of the schedule."""

    workload: str
    load: float
    round: int
    turn: str
    """The system, or its second turn of a round."""
    chunk: str
    good: str
    """`1` for each request that met both targets, `0` for each other."""
    window_s: float
    ttft_ms: Sequence[float]
    """Complete answers alone are counted, here and in the next two."""
    tpot_ms: Sequence[float]
    itl_ms: Sequence[float]
    commit: str = ""
    valid: bool = True
    """False: the generator was late, twice."""

    @property
    def outcomes(self) -> list[bool]:
        """`good` as truth values."""
        return [mark == "1" for mark in self.good]

    @staticmethod
    def of(result: RunResult, slo: Slo, **place: Any) -> Window:
        """Made from a run; `place` are the fields that say which window it is."""
        # The numbers of later turns depend on when the earlier ones were answered.
        records = sorted(result.records, key=lambda record: (record.conversation, record.turn))
        answered = [(record, metrics) for record in records if (metrics := request_metrics(record)) is not None]
        return Window(
            good="".join("1" if is_good(record, slo) else "0" for record in records),
            window_s=result.window_s,
            ttft_ms=[_ms(metrics.ttft_s) for _, metrics in answered],
            tpot_ms=[_ms(metrics.tpot_s) for _, metrics in answered if metrics.tpot_s is not None],
            itl_ms=[_ms(gap_s) for record, _ in answered for gap_s in inter_token_s(record)],
            valid=not invalid_reasons(result),
            **place,
        )


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A workload with what was found for it before its first round."""

    name: str
    spec: str
    """As `parse_workload` reads it."""
    slo: Slo
    capacity: Capacity
    """Of the collocated system; loads are shares of its rate."""
    chunks: Mapping[str, str]
    """The best chunk budget of each fixed system, by its name."""

    @staticmethod
    def of(kept: Mapping[str, Any]) -> Calibrated:
        """Read from a study's file; raises KeyError or TypeError for what is none."""
        of_it = dict(kept)
        capacity = Capacity(of_it.pop("capacity"), of_it.pop("capacity_is_floor", False))
        return Calibrated(**{**of_it, "slo": Slo(**kept["slo"]), "capacity": capacity})

    def as_kept(self) -> dict[str, Any]:
        """As a study's file has it."""
        return {**asdict(self), "capacity": self.capacity.rate, "capacity_is_floor": self.capacity.is_floor}


@dataclass(slots=True)
class Study:
    """All that a study has measured so far, and the settings that all of it has in common."""

    settings: dict[str, Any]
    workloads: dict[str, Calibrated]
    windows: list[Window]

    def next_round(self, workload: str, load: float, turns: Sequence[str]) -> int:
        """The first round of a cell in which a turn is missing."""
        done = {(w.round, w.turn) for w in self.windows if (w.workload, w.load) == (workload, load)}
        number = 0
        while all((number, turn) in done for turn in turns):
            number += 1
        return number

    def has(self, workload: str, load: float, number: int, turn: str) -> bool:
        """Whether that window was measured."""
        wanted = (workload, load, number, turn)
        return any((w.workload, w.load, w.round, w.turn) == wanted for w in self.windows)


class WindowFile:
    """A study as lines of JSON, written as they come, so that a study that is cut off can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: Mapping[str, Any]) -> Study:
        """Starts anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")
        self._add("settings", settings)
        return Study(dict(settings), {}, [])

    def resume(self, settings: Mapping[str, Any]) -> Study:
        """What the file holds; raises ConfigError (`continue`) where one of these settings is another in it, or where
        it is no study's."""
        study: Study | None = None
        complete, _, rest = self.path.read_text().rpartition("\n")
        try:
            for line in complete.splitlines():
                [(kind, value)] = json.loads(line).items()
                if kind == "settings":
                    study = Study(value, {}, [])
                elif study is not None and kind == "workload":
                    study.workloads[value["name"]] = Calibrated.of(value)
                elif study is not None:
                    study.windows.append(Window(**value))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"continue: {self.path} is not a study's file: {error}", field="continue") from error
        if study is None:
            raise ConfigError(f"continue: {self.path} has no settings", field="continue")
        _check_same(study.settings, settings)
        if rest:  # of a line that was cut off
            self.path.write_text(f"{complete}\n")
        return study

    def add_workload(self, workload: Calibrated) -> None:
        """Keeps what calibration found."""
        self._add("workload", workload.as_kept())

    def add_window(self, window: Window) -> None:
        """Keeps a window."""
        self._add("window", {field.name: getattr(window, field.name) for field in fields(window)})

    def _add(self, kind: str, value: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({kind: value}, ensure_ascii=False, separators=(",", ":")) + "\n")


def _check_same(kept: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if kept.get(name) != value:
            raise ConfigError(f"continue: the kept study has {name} {kept.get(name)}, not {value}", field="continue")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
