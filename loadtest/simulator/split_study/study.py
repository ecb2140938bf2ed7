"""The study's state: what each mix can serve, what each cell and scenario gave; in a file after each of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtest.rig.markdown import bold, table
from loadtest.rig.results import commit, machine, write_json
from loadtest.simulator.load import WORKLOADS
from loadtest.simulator.simulation import AUTO
from loadtest.simulator.split_study.cells import TARGETS, Cell, Compared, Loads, compare
from loadtest.simulator.split_study.scenarios import turnover, two_speeds
from loadtest.simulator.split_study.search import capacity
from loadtest.simulator.split_study.systems import Pool, Run, System, run
from shared.errors import ConfigError

Rows = dict[str, Any]


class Study:
    """What is known so far, in its file after each cell."""

    def __init__(self, pool: Pool, loads: Loads, out: Path | None, rows: Rows) -> None:
        self.rows = rows
        self._pool, self._loads, self._out = pool, loads, out

    def run_cells(self, executor: ProcessPoolExecutor, cells: Sequence[Cell]) -> None:
        """Those that are not known yet: first each mix's capacity."""
        open_cells = [cell for cell in cells if cell.name not in self.rows["cells"]]
        mixes = dict.fromkeys((cell.workload, cell.targets) for cell in open_cells)
        found: dict[tuple[str, str], Future[tuple[float, list[System]]]] = {}
        for workload, pair in mixes:
            if f"{workload}, {pair}" not in self.rows["capacities"]:
                found[workload, pair] = executor.submit(find_capacity, self._pool, self._loads, workload, pair)
        running: dict[Cell, Future[Compared]] = {}
        for mix in mixes:
            if mix in found:
                rate, starts = found[mix].result()
                self.rows["capacities"][", ".join(mix)] = {"rate": rate, "starts": starts}
                self._write()
            known = self.rows["capacities"][", ".join(mix)]
            for cell in open_cells:
                if (cell.workload, cell.targets) == mix:
                    starts = [System(*start) for start in known["starts"]]
                    args = (self._pool, self._loads, cell, known["rate"], starts)
                    running[cell] = executor.submit(run_cell, *args)
        for cell, future in running.items():
            self._note("cells", cell.name, future.result())

    def run_auto_anew(self, executor: ProcessPoolExecutor, cells: Sequence[Cell]) -> None:
        """Auto alone, beside what is known of the fixed systems of these cells."""
        running: dict[Cell, Future[Run]] = {}
        for cell in cells:
            if cell.name in self.rows["cells"]:
                rate = self.rows["capacities"][f"{cell.workload}, {cell.targets}"]["rate"]
                running[cell] = executor.submit(run_auto, self._pool, self._loads, cell, rate)
        for cell, future in running.items():
            row = self.rows["cells"][cell.name]
            tried = [Run(**found) for found in row["tried"]]
            best = Run(**row["best"])
            self._note("cells", cell.name, Compared(best, future.result(), tried, row["num_left_out"]))

    def run_scenarios(self, executor: ProcessPoolExecutor, scenarios: Sequence[str], mixed: Pool) -> None:
        """Those that are not known yet."""
        pair = TARGETS["balanced"]
        if "turnover" in scenarios and "turnover" not in self.rows["scenarios"]:
            found = executor.submit(turnover, self._pool, pair, self._loads, 200.0).result()
            self._note("scenarios", "turnover", found.compared, settled_s=found.settled_s)
        if "two-speeds" in scenarios:
            for workload in WORKLOADS:
                name = f"two-speeds, {workload}"
                if name not in self.rows["scenarios"]:
                    compared = executor.submit(two_speeds, mixed, pair, self._loads, workload, 0.9).result()
                    self._note("scenarios", name, compared)

    def _note(self, kind: str, name: str, compared: Compared, **more: object) -> None:
        print(
            f"{name}: auto {compared.auto.goodput:.1f}, best {compared.best.goodput:.1f} ({compared.best.system}), "
            f"ratio {compared.ratio:.3f}",
            file=sys.stderr,
            flush=True,
        )
        self.rows[kind][name] = {
            "best": compared.best._asdict(),
            "auto": compared.auto._asdict(),
            "tried": [run._asdict() for run in compared.tried],
            "num_left_out": compared.num_left_out,
            "ratio": compared.ratio,
            **more,
        }
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            write_json(
                self._out, {"machine": machine(), "commit": commit(), "results": results(self.rows), **self.rows}
            )


def find_capacity(pool: Pool, loads: Loads, workload: str, pair: str) -> tuple[float, list[System]]:
    """See `capacity`."""
    return capacity(pool, loads.targets(pair, workload), partial(loads.requests, workload))


def run_cell(pool: Pool, loads: Loads, cell: Cell, rate: float, starts: Sequence[System]) -> Compared:
    """See `compare`."""
    requests = loads.requests(cell.workload, cell.load * rate)
    return compare(pool, loads.targets(cell.targets, cell.workload), requests, starts)


def run_auto(pool: Pool, loads: Loads, cell: Cell, rate: float) -> Run:
    """Auto in a cell."""
    requests = loads.requests(cell.workload, cell.load * rate)
    return run(System(AUTO), pool, loads.targets(cell.targets, cell.workload), requests)


def results(rows: Rows) -> list[dict[str, object]]:
    """In the form that all benchmarks share."""
    found = []
    for kind in ("cells", "scenarios"):
        for name, row in rows[kind].items():
            best = row["best"]
            found.append({"name": f"{name} best fixed: goodput", "value": best["goodput"], "unit": "req/s"})
            auto = {"name": f"{name} auto: goodput", "value": row["auto"]["goodput"], "unit": "req/s"}
            found.append({**auto, "peer": best["system"], "ratio": row["ratio"]})
    return found


def report(rows: Rows) -> str:
    """Tables in Markdown, and the ratios in one line."""
    lines = [
        [
            name,
            f"{row['auto']['offered']:.1f}",
            row["best"]["system"],
            f"{row['best']['goodput']:.1f}",
            f"{row['auto']['goodput']:.1f}",
            bold(f"{row['ratio']:.3f}", row["ratio"] < 0.99),
            f"{row['auto']['ttft_p90_s'] * 1e3:.0f} ms",
            f"{row['auto']['tpot_p90_s'] * 1e3:.1f} ms",
            f"{len(row['tried'])} of {len(row['tried']) + row['num_left_out']}",
        ]
        for kind in ("cells", "scenarios")
        for name, row in rows[kind].items()
    ]
    text = table(_COLUMNS, lines, left=(0, 2))
    ratios = [row["ratio"] for row in rows["cells"].values()]
    if ratios:
        text += (
            f"\n\nauto over the best fixed: mean {fmean(ratios):.3f}, least {min(ratios):.3f}, most {max(ratios):.3f}"
        )
    turned = rows["scenarios"].get("turnover")
    if turned:
        settled = ", ".join(f"{seconds:g} s" for seconds in turned["settled_s"])
        text += f"\n\nafter the mix turned over, auto had 90 % of the new best after {settled}"
    return text


_COLUMNS = (
    "workload, targets, load", "req/s", "best fixed", "its goodput", "auto", "ratio", "TTFT p90", "TPOT p90", "tried",
)  # fmt: skip


def kept(out: Path | None) -> Rows:
    if out is None:
        raise ConfigError("--continue needs --out", field="continue")
    empty: Rows = {"capacities": {}, "cells": {}, "scenarios": {}}
    return {key: json.loads(out.read_text()).get(key, {}) for key in empty} if out.exists() else empty
