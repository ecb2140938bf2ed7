"""Several runs, or several sweeps, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.results import SUMMARY, SWEEP, read_json
from loadtest.tables import failures_text, number, slo_text
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every folder."""

    name: str
    values: tuple[float | None, ...]
    texts: tuple[str, ...]
    better: int = 0
    """1: more is better, -1: less is, 0: neither."""

    @property
    def best(self) -> int | None:
        """Index of the best folder; None if there is no better or worse, or for a tie."""
        known = [value for value in self.values if value is not None]
        if not self.better or len(known) < 2:
            return None
        wanted = max(known) if self.better > 0 else min(known)
        return self.values.index(wanted) if known.count(wanted) == 1 else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of several folders of one kind, and the differences between their settings."""

    kind: str  # "run" or "sweep"
    folders: tuple[Path, ...]
    names: tuple[str, ...]
    contents: tuple[Mapping[str, Any], ...]  # each folder's summary.json or sweep.json
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    """Messages about what makes the comparison unfair."""

    def as_json(self) -> dict[str, Any]:
        """For comparison.json."""
        return {
            "kind": self.kind,
            "folders": [str(folder) for folder in self.folders],
            "names": list(self.names),
            "differences": list(self.differences),
            "rows": [{"name": row.name, "values": list(row.values)} for row in self.rows],
        }


def compare(folders: Sequence[Path]) -> Comparison:
    """Reads the folders; raises ConfigError (`path`) if they are not results of one kind."""
    kinds = {SWEEP if (folder / SWEEP).exists() else SUMMARY for folder in folders}
    if len(kinds) > 1:
        raise ConfigError("cannot compare a run with a sweep", field="path")
    kind = kinds.pop()
    contents = tuple(read_json(folder / kind) for folder in folders)
    rows = _sweep_rows(contents) if kind == SWEEP else _run_rows(contents)
    return Comparison(
        kind="sweep" if kind == SWEEP else "run",
        folders=tuple(folders),
        names=_names(folders, contents),
        contents=contents,
        rows=tuple(rows),
        differences=tuple(_differences(contents)),
    )


def _names(folders: Sequence[Path], contents: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The labels if they are distinct, else the folders' names."""
    labels = [str(content["label"]) for content in contents]
    if all(labels) and len(set(labels)) == len(labels):
        return tuple(labels)
    return tuple(folder.name or str(folder) for folder in folders)


def _run_rows(contents: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = [
        _row("offered, req/s", [c["offered_rate"] for c in contents]),
        _row("goodput, req/s", [c["goodput"] for c in contents], 1),
        _row("attainment", [c["attainment"] for c in contents], 1, percent=True),
    ]
    for key, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2E")):
        for stat in ("p50", "p99"):
            rows.append(_row(f"{title} {stat}, ms", [c[f"{stat}_{key}_ms"] for c in contents], -1))
    rows.append(_row("output tokens/s", [c["output_throughput"] for c in contents], 1))
    rows.append(_row("cached prompt tokens", [c["cached_share"] for c in contents], percent=True))
    failed = tuple(float(c["failed"]) for c in contents)
    rows.append(Row("failed", failed, tuple(failures_text(c) for c in contents), -1))
    return rows


def _sweep_rows(contents: Sequence[Mapping[str, Any]]) -> list[Row]:
    wanted = f"{contents[0]['wanted_attainment']:.0%}"
    rows = []
    for key, share in (("max_goodput", wanted), ("max_goodput_at_99", "99%")):
        found = [(c[key] or {}).get("goodput", 0.0) for c in contents]  # 0 for a system that never meets the targets
        rows.append(_row(f"max goodput at ≥ {share}, req/s", found, 1))
    rows.append(_row("offered rate there, req/s", [(c["max_goodput"] or {}).get("offered_rate") for c in contents]))
    rows.append(_row("knee, req/s offered", [(c["knee"] or {}).get("offered_rate") for c in contents]))
    for key, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        for stat in ("p50", "p99"):
            rows.append(_row(f"{title} {stat} there, ms", [_at_best(c, f"{stat}_{key}_ms") for c in contents]))
    return rows


def _at_best(sweep: Mapping[str, Any], name: str) -> float | None:
    """A figure of the point with the maximum goodput."""
    best = sweep["max_goodput"]
    row = next((row for row in sweep["points"] if best is not None and row["rate"] == best["rate"]), None)
    return None if row is None else row[name]


def _row(name: str, values: Sequence[float | None], better: int = 0, percent: bool = False) -> Row:
    texts = tuple("-" if v is None else f"{v:.1%}" if percent else number(v) for v in values)
    return Row(name, tuple(values), texts, better)


def _differences(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Messages about settings that should be equal and are not, and about partial or invalid runs."""
    found = []
    for key, title in (("workload", "workloads"), ("seed", "seeds"), ("model_id", "models")):
        if len({str(content[key]) for content in contents}) > 1:
            found.append(f"the {title} differ: {', '.join(str(content[key]) for content in contents)}")
    if len({slo_text(content) for content in contents}) > 1:
        found.append(f"the targets differ: {'; '.join(slo_text(content) or 'none' for content in contents)}")
    for i, content in enumerate(contents, start=1):
        if content["partial"]:
            found.append(f"number {i} is partial: {content['partial_reason']}")
        found += [f"number {i} is invalid: {reason}" for reason in content.get("invalid_reasons", ())]
    return found
