"""`python -m loadtest.simulator.split_study --out FILE`: mode auto beside the best static system of each cell."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, Out, choice, decimals, names
from loadtest.rig.command_line import run as run_command
from loadtest.rig.results import commit
from loadtest.simulator.cli import MODELS, WorkerOptions, worker_spec
from loadtest.simulator.load import WORKLOADS
from loadtest.simulator.split_study.cells import LOADS, TARGETS, Cell, Loads
from loadtest.simulator.split_study.runs import Runs
from loadtest.simulator.split_study.study import Study, report
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
    loads: Annotated[str, Option(help="of the best static system's capacity; none: no cells")] = " ".join(
        map(str, LOADS)
    ),
    targets: Annotated[str, Option(help=f"pairs: {', '.join(TARGETS)}")] = " ".join(TARGETS),
    scenarios: Annotated[str, Option(help=f"besides: {', '.join(SCENARIOS)}, or none")] = "none",
    workers: Annotated[int, Option()] = 32,
    seconds: Annotated[float, Option(help="of arrivals in a run, at least")] = 15.0,
    lives: Annotated[float, Option(help="of a mean answer that requests arrive for, at least")] = 3.0,
    limits: Annotated[bool, Option(help="find the rates up to which nine in ten are in time, too")] = False,
    phase: Annotated[float, Option(help="seconds of each of turnover's three mixes")] = 200.0,
    model: Annotated[str, Option(help=", ".join(sorted(MODELS)))] = "llama-3-8b",
    device: Annotated[str, Option(help=", ".join(GPUS))] = "H100",
    slow: Annotated[str, Option(help="of half the workers in two-speeds")] = SLOW,
    steps: Annotated[Path | None, Option(help="step times from a file, not the roofline")] = None,
    quick: Annotated[
        bool,
        Option(help=f"{_QUICK_WORKERS} workers, two loads, one pair of targets, {_QUICK_SECONDS:g} s"),
    ] = False,
    runs: Annotated[
        Path | None,
        Option(
            help="file of JSON lines for all runs: what it has is not run again, of mode auto what is of this commit"
        ),
    ] = None,
    jobs: Annotated[int, Option(help="processes")] = 1,
    seed: Annotated[int, Option()] = 0,
    searched_seed: Annotated[
        int | None,
        Option(help="search nothing: the rates, and of each cell the best static system, that --runs has of that seed"),
    ] = None,
) -> None:
    """Compare mode auto with the best static system of each cell: every split of two pools, and one pool with chunks of
    each size; and with one pool with chunks by time."""
    if quick:
        workers, seconds = _QUICK_WORKERS, _QUICK_SECONDS
        loads, targets = " ".join(map(str, _QUICK_LOADS)), " ".join(_QUICK_TARGETS)
    traces = {name: path for name, path in (("mooncake", mooncake), ("azure", azure)) if path is not None}
    chosen = names(cells, "cells", [*WORKLOADS, *traces])
    options = WorkerOptions(choice(model, "model", MODELS), choice(device, "device", GPUS), 1, steps=steps)
    fast = worker_spec(options, None, 0.0)
    name = f"{workers} {model} {device} {steps.stem if steps else 'roofline'}"
    known = Runs(runs, commit())
    study = Study(Pool([fast] * workers, seed, name), Loads(traces, seconds, seed, lives), out, known, searched_seed)
    mixes = [(workload, pair) for workload in chosen for pair in names(targets, "targets", TARGETS)]
    wanted = [] if loads == "none" else [Cell(*mix, load) for mix in mixes for load in decimals(loads, "loads")]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as executor:
        study.run_cells(executor, wanted)
        if limits:
            study.run_limits(executor, mixes)
        if scenarios != "none":
            wanted_scenarios = names(scenarios, "scenarios", SCENARIOS)
            slower = worker_spec(replace(options, device=choice(slow, "slow", GPUS), steps=None), None, 0.0)
            half = workers // 2
            mixed = Pool([fast] * (workers - half) + [slower] * half, seed)
            study.run_scenarios(executor, wanted_scenarios, mixed, phase)
    print(report(study.rows))


if __name__ == "__main__":
    run_command(main, name="python -m loadtest.simulator.split_study")
