"""`python -m loadtest.simulator.split_study --out FILE`: mode auto beside the best fixed system of each cell."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, Out, choice, decimals, names
from loadtest.rig.command_line import run as run_command
from loadtest.simulator.cli import MODELS, WorkerOptions, worker_spec
from loadtest.simulator.load import WORKLOADS
from loadtest.simulator.split_study.cells import LOADS, TARGETS, Cell, Loads
from loadtest.simulator.split_study.study import Study, kept, report
from loadtest.simulator.split_study.systems import Pool
from shared.sizing.devices import GPUS

SCENARIOS = ("turnover", "two-speeds")
SLOW = "L40S"
_QUICK_LOADS, _QUICK_TARGETS, _QUICK_SECONDS, _QUICK_WORKERS = (0.6, 1.0), ("balanced",), 10.0, 8


def main(
    out: Out = None,
    cells: Annotated[str, Option(help=f"workloads: {', '.join(WORKLOADS)}, mooncake, azure")] = " ".join(WORKLOADS),
    mooncake: Annotated[Path | None, Option(help="that trace's file")] = None,
    azure: Annotated[Path | None, Option(help="that trace's file")] = None,
    loads: Annotated[str, Option(help="of the best fixed system's capacity")] = " ".join(map(str, LOADS)),
    targets: Annotated[str, Option(help=f"pairs: {', '.join(TARGETS)}")] = " ".join(TARGETS),
    scenarios: Annotated[str, Option(help=f"besides: {', '.join(SCENARIOS)}, or none")] = "none",
    workers: Annotated[int, Option()] = 32,
    seconds: Annotated[float, Option(help="of arrivals in a run, at least")] = 15.0,
    model: Annotated[str, Option(help=", ".join(sorted(MODELS)))] = "llama-3-8b",
    device: Annotated[str, Option(help=", ".join(GPUS))] = "H100",
    slow: Annotated[str, Option(help="of half the workers in two-speeds")] = SLOW,
    steps: Annotated[Path | None, Option(help="step times from a file, not the roofline")] = None,
    quick: Annotated[
        bool,
        Option(help=f"{_QUICK_WORKERS} workers, two loads, one pair of targets, {_QUICK_SECONDS:g} s"),
    ] = False,
    continue_: Annotated[bool, Option(name="continue", help="keep what OUT has of cells")] = False,
    anew: Annotated[
        bool, Option(help="of the cells that OUT has auto alone, beside the fixed systems as they are there")
    ] = False,
    jobs: Annotated[int, Option(help="processes")] = 1,
    seed: Annotated[int, Option()] = 0,
) -> None:
    """Compare mode auto with the best fixed system of each cell: every split of two pools, and one pool with chunks of
    each size."""
    if quick:
        workers, seconds = _QUICK_WORKERS, _QUICK_SECONDS
        loads, targets = " ".join(map(str, _QUICK_LOADS)), " ".join(_QUICK_TARGETS)
    traces = {name: path for name, path in (("mooncake", mooncake), ("azure", azure)) if path is not None}
    chosen = names(cells, "cells", [*WORKLOADS, *traces])
    options = WorkerOptions(choice(model, "model", MODELS), choice(device, "device", GPUS), 1, steps=steps)
    fast = worker_spec(options, None, 0.0)
    study = Study(
        Pool([fast] * workers, seed),
        Loads(traces, seconds, seed),
        out,
        kept(out) if continue_ or anew else {"capacities": {}, "cells": {}, "scenarios": {}},
    )
    wanted = [
        Cell(workload, pair, load)
        for workload in chosen
        for pair in names(targets, "targets", TARGETS)
        for load in decimals(loads, "loads")
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as executor:
        if anew:
            study.run_auto_anew(executor, wanted)
        else:
            study.run_cells(executor, wanted)
        if scenarios != "none":
            wanted_scenarios = names(scenarios, "scenarios", SCENARIOS)
            slower = worker_spec(replace(options, device=choice(slow, "slow", GPUS), steps=None), None, 0.0)
            half = workers // 2
            study.run_scenarios(executor, wanted_scenarios, Pool([fast] * (workers - half) + [slower] * half, seed))
    print(report(study.rows))


if __name__ == "__main__":
    run_command(main, name="python -m loadtest.simulator.split_study")
