"""The study: what each mix can serve, what each cell and scenario gave; in a file after each of them."""

from __future__ import annotations

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
from loadtest.simulator.split_study.cells import BY_TIME, TARGETS, Cell, Compared, Loads, compare
from loadtest.simulator.split_study.runs import Runs
from loadtest.simulator.split_study.scenarios import turnover, two_speeds
from loadtest.simulator.split_study.search import ATTAINED, Search, capacity, reach
from loadtest.simulator.split_study.systems import Pool, System
from shared.errors import ConfigError

Rows = dict[str, Any]
Mix = tuple[str, str]
"""A workload and a pair of targets."""
GRAIN = 1.03
"""Largest ratio of the two rates between which a limit lies."""


class Study:
    """What was found, in its file after each cell."""

    def __init__(
        self, pool: Pool, loads: Loads, out: Path | None, runs: Runs, searched_seed: int | None = None
    ) -> None:
        """`searched_seed`: the seed whose runs say which rates and static systems are run; None: that is searched for.
        A system that was the best of many with one seed is no luckier than others with another."""
        self.rows: dict[str, Rows] = {"cells": {}, "limits": {}, "scenarios": {}}
        self._pool, self._loads, self._out, self._runs = pool, loads, out, runs
        self._searched_seed = searched_seed

    def run_cells(self, executor: ProcessPoolExecutor, cells: Sequence[Cell]) -> None:
        """First each mix's capacity, then its cells."""
        mixes = dict.fromkeys((cell.workload, cell.targets) for cell in cells)
        found = self._capacities(executor, list(mixes))
        running: dict[Cell, Future[Compared]] = {}
        for cell in cells:
            rate, starts = found[cell.workload, cell.targets].result()
            running[cell] = executor.submit(
                run_cell, self._pool, self._loads, self._runs, cell, rate, starts, self._searched_seed
            )
        for cell, future in running.items():
            self._note("cells", cell.name, future.result())

    def run_limits(self, executor: ProcessPoolExecutor, mixes: Sequence[Mix]) -> None:
        """Up to which rate ATTAINED of the requests are in time: in mode auto, with the best static system, and in one
        pool with chunks by time."""
        found = self._capacities(executor, mixes)
        running = {
            mix: executor.submit(find_limits, self._pool, self._loads, self._runs, mix, *found[mix].result())
            for mix in mixes
        }
        for mix, future in running.items():
            self.rows["limits"][", ".join(mix)] = future.result()
            self._write()

    def run_scenarios(
        self, executor: ProcessPoolExecutor, scenarios: Sequence[str], mixed: Pool, phase_s: float
    ) -> None:
        """Runs the scenarios that are named."""
        pair = TARGETS["balanced"]
        if "turnover" in scenarios:
            found = executor.submit(turnover, self._pool, pair, self._loads, phase_s).result()
            self._note("scenarios", "turnover", found.compared, settled_s=found.settled_s)
        if "two-speeds" in scenarios:
            for workload in WORKLOADS:
                compared = executor.submit(two_speeds, mixed, pair, self._loads, workload, 0.9).result()
                self._note("scenarios", f"two-speeds, {workload}", compared)

    def _capacities(
        self, executor: ProcessPoolExecutor, mixes: Sequence[Mix]
    ) -> dict[Mix, Future[tuple[float, list[System]]]]:
        return {
            mix: executor.submit(find_capacity, self._pool, self._loads, self._runs, mix, self._searched_seed)
            for mix in mixes
        }

    def _note(self, kind: str, name: str, compared: Compared, **more: object) -> None:
        print(
            f"{name}: auto {compared.auto.goodput:.1f}, best {compared.best.goodput:.1f} ({compared.best.system}), "
            f"by time {compared.by_time.goodput:.1f}, ratio {compared.ratio:.3f}",
            file=sys.stderr,
            flush=True,
        )
        self.rows[kind][name] = {
            "best": compared.best._asdict(),
            "by_time": compared.by_time._asdict(),
            "auto": compared.auto._asdict(),
            "tried": [run._asdict() for run in compared.tried],
            "num_left_out": compared.num_left_out,
            "ratio": compared.ratio,
            "ratio_by_time": compared.ratio_by_time,
            **more,
        }
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            write_json(
                self._out, {"machine": machine(), "commit": commit(), "results": results(self.rows), **self.rows}
            )


def find_capacity(
    pool: Pool, loads: Loads, runs: Runs, mix: Mix, searched_seed: int | None = None
) -> tuple[float, list[System]]:
    """See `capacity`; as it is known, where it is. Raises ConfigError where it is not, of `searched_seed`."""
    key = {**loads.key(pool, *mix, 0.0), "rate": None}
    if searched_seed is not None:
        key["seed"] = searched_seed
    found = runs.capacity(key)
    if found is None:
        if searched_seed is not None:
            raise _unknown(searched_seed, ", ".join(mix))
        workload, pair = mix
        found = capacity(
            pool,
            loads.targets(pair, workload),
            partial(loads.requests, workload),
            known=runs,
            key_at=partial(loads.key, pool, workload, pair),
        )
        runs.add_capacity(key, *found)
    return found


def searched(pool: Pool, loads: Loads, runs: Runs, mix: Mix, rate: float) -> Search:
    """A search over a mix at a rate."""
    workload, pair = mix
    key = loads.key(pool, workload, pair, rate)
    return Search(pool, loads.targets(pair, workload), loads.requests(workload, rate), runs, key)


def run_cell(
    pool: Pool,
    loads: Loads,
    runs: Runs,
    cell: Cell,
    rate: float,
    starts: Sequence[System],
    searched_seed: int | None = None,
) -> Compared:
    """See `compare`. Raises ConfigError where `searched_seed` has no run of the cell."""
    search = searched(pool, loads, runs, (cell.workload, cell.targets), cell.load * rate)
    if searched_seed is None:
        return compare(search, search.best(starts))
    best = search.best_known(searched_seed)
    if best is None:
        raise _unknown(searched_seed, cell.name)
    return compare(search, best)


def _unknown(seed: int, name: str) -> ConfigError:
    return ConfigError(f"--searched-seed {seed}: --runs has no search of {name}", field="searched_seed")


def find_limits(
    pool: Pool, loads: Loads, runs: Runs, mix: Mix, rate: float, starts: Sequence[System]
) -> dict[str, Any]:
    """By system: the rate up to which ATTAINED of the requests are in time. The best static system is that of the
    capacity's rate."""

    def limit(systems: Sequence[System]) -> float:
        def share_at(at: float) -> float:
            search = searched(pool, loads, runs, mix, at)
            return search.runs[search.best_of(systems)].share

        return reach(share_at, rate, ATTAINED, 1.1, GRAIN, 8)

    near = searched(pool, loads, runs, mix, rate)
    static = [near.best(starts)]
    auto, by_time, best = (limit(systems) for systems in ([System(AUTO)], [BY_TIME], static))
    return {
        "auto": auto, "by_time": by_time, "best": best, "system": static[0].name,
        "ratio": auto / best, "ratio_by_time": auto / by_time,
    }  # fmt: skip


def results(rows: Rows) -> list[dict[str, object]]:
    """In the form that all benchmarks share."""
    found: list[dict[str, object]] = []
    for kind in ("cells", "scenarios"):
        for name, row in rows[kind].items():
            best = row["best"]
            found.append({"name": f"{name} best static: goodput", "value": best["goodput"], "unit": "req/s"})
            found.append({"name": f"{name} by time: goodput", "value": row["by_time"]["goodput"], "unit": "req/s"})
            auto = {"name": f"{name} auto: goodput", "value": row["auto"]["goodput"], "unit": "req/s"}
            found.append({**auto, "peer": best["system"], "ratio": row["ratio"]})
    for name, row in rows["limits"].items():
        limit = {"name": f"{name} auto: limit", "value": row["auto"], "unit": "req/s"}
        found.append({**limit, "peer": row["system"], "ratio": row["ratio"]})
    return found


def report(rows: Rows) -> str:
    """Tables in Markdown, and the ratios in one line."""
    lines = [
        [
            name,
            f"{row['auto']['offered']:.1f}",
            row["best"]["system"],
            _share(row["best"]),
            _share(row["by_time"]),
            _share(row["auto"]),
            bold(f"{row['ratio']:.3f}", row["ratio"] < 0.99),
            bold(f"{row['ratio_by_time']:.3f}", row["ratio_by_time"] < 0.99),
            f"{row['auto']['ttft_p90_s'] * 1e3:.0f} ms",
            f"{row['auto']['tpot_p90_s'] * 1e3:.1f} ms",
            f"{len(row['tried'])} of {len(row['tried']) + row['num_left_out']}",
        ]
        for kind in ("cells", "scenarios")
        for name, row in rows[kind].items()
    ]
    parts = [table(_COLUMNS, lines, left=(0, 2))] if lines else []
    for ratio, over in (("ratio", "the best static system"), ("ratio_by_time", "one pool with chunks by time")):
        found = [row[ratio] for row in rows["cells"].values()]
        if found:
            parts.append(f"auto over {over}: mean {fmean(found):.3f}, least {min(found):.3f}, most {max(found):.3f}")
    if rows["limits"]:
        limits = [
            [
                name, row["system"], f"{row['best']:.1f}", f"{row['by_time']:.1f}", f"{row['auto']:.1f}",
                bold(f"{row['ratio']:.3f}", row["ratio"] < 0.99), f"{row['ratio_by_time']:.3f}",
            ]
            for name, row in rows["limits"].items()
        ]  # fmt: skip
        parts.append(table(_LIMIT_COLUMNS, limits, left=(0, 1)))
    turned = rows["scenarios"].get("turnover")
    if turned:
        settled = ", ".join(f"{seconds:g} s" for seconds in turned["settled_s"])
        parts.append(f"after the mix turned over, auto had 90 % of the new best after {settled}")
    return "\n\n".join(parts)


def _share(run: Rows) -> str:
    return f"{run['goodput'] / run['offered']:.3f}"


_COLUMNS = (
    "workload, targets, load", "req/s", "best static", "in time", "by time", "auto", "ratio", "over by time",
    "TTFT p90", "TPOT p90", "tried",
)  # fmt: skip
_LIMIT_COLUMNS = ("workload, targets", "best static", "req/s", "by time", "auto", "ratio", "over by time")
