"""`python -m loadtest baseline`."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from loadtest.baseline.cells import cells_of
from loadtest.baseline.design import Design
from loadtest.baseline.fleet import Fleet
from loadtest.baseline.options import LoadOptions, SystemOptions
from loadtest.baseline.outcome import beside, write_outcome
from loadtest.baseline.study import run_study
from loadtest.baseline.systems import collocated
from loadtest.baseline.windows import Study, WindowFile
from loadtest.baseline.workloads import OF_GUESSES, WORKLOADS, WindowSize, parse_workloads, window_plan
from loadtest.commands import EXIT_DOUBTFUL, EXIT_INTERRUPTED, EXIT_OK, with_interrupt
from loadtest.config import MAX_SEED
from loadtest.options import duration_s
from loadtest.rig.command_line import Option, decimals
from loadtest.rig.results import commit
from loadtest.slo import Slo, parse_slo
from shared.errors import ConfigError

WANTED = 300
"""Requests of a system at a load, below which nothing is named."""


def baseline(
    systems: SystemOptions,
    load: LoadOptions,
    out: Annotated[
        Path | None,
        Option("JSON file for the figures, with tables, page and windows beside it; default: in out/", writes="file"),
    ] = None,
    go_on: Annotated[
        bool, Option("keep the windows beside OUT, and measure what is missing or more", name="continue")
    ] = False,
    budget: Annotated[str, Option("time for everything; what does not fit is not measured")] = "14m",
    within: Annotated[
        float, Option("percent: an interval up to ± this shows that there is no difference", at_least=0)
    ] = 5.0,
    traces: Annotated[
        Path | None, Option("folder for each window's requests, as the simulator reads them", writes="folder")
    ] = None,
) -> int:
    """Compare ways to use this machine's workers by goodput, under the same requests at fixed loads."""
    out = out if out is not None else Path("out", "loadtest", time.strftime("%Y%m%d-%H%M%S"), "figures.json")
    budget_s = duration_s(budget)
    if budget_s <= 0:
        raise ConfigError(f"budget must be above 0s, got {budget}", field="budget")
    design = _design(systems, load, traces)
    file = WindowFile(beside(out, ".windows.jsonl"))
    study = _study(file, design, systems.settings, go_on, load.seed is not None)
    design = replace(design, seed=study.settings["seed"])
    with tempfile.TemporaryDirectory(prefix="tandem-loadtest-") as scratch:
        fleet = Fleet(systems.hardware(Path(scratch)), beside(out, ".logs"))
        stopped, interrupted = with_interrupt(lambda stop: run_study(design, study, file, fleet, budget_s, stop))
    cells = cells_of(design, study, WANTED, within / 100)
    origin = f"{systems.label} · seed {design.seed}"
    text = write_outcome(out, design, cells, f"{origin} · {design.commit}", stopped)
    print(f"\n{text}\nfigures: {out}, page: {beside(out, '.html')}")
    return EXIT_INTERRUPTED if interrupted else EXIT_DOUBTFUL if stopped else EXIT_OK


def _design(systems: SystemOptions, load: LoadOptions, traces: Path | None) -> Design:
    """What the options ask for; raises ConfigError naming the one that is wrong, before anything starts."""
    systems.check()
    default = OF_GUESSES if systems.speculation else WORKLOADS
    design = Design(
        workloads=parse_workloads(load.workloads or " ".join(default)),
        loads=_loads(load.loads),
        collocated=collocated(systems.workers),
        splits=systems.splits(),
        adaptive=systems.adaptive(),
        chunks=systems.budgets(),
        rounds=load.rounds,
        size=WindowSize(load.requests, duration_s(load.window)),
        slo=None if load.slo is None else parse_slo(load.slo),
        seed=secrets.randbelow(MAX_SEED) if load.seed is None else load.seed,
        vocab_size=load.vocab_size,
        commit=commit(),
        traces=traces,
        warm_up=load.warm_up,
    )
    for spec in design.workloads.values():
        window_plan(spec, Slo(1.0), 1.0, design.size, design.seed, design.vocab_size)
    return design


def _study(file: WindowFile, design: Design, common: Mapping[str, object], go_on: bool, seed_given: bool) -> Study:
    """What was measured before, where the study continues; raises ConfigError where that was another study."""
    settings = {
        **common,
        "systems": [system.name for system in design.fixed],
        "window": asdict(design.size),
        "slo": None if design.slo is None else asdict(design.slo),
        "vocab_size": design.vocab_size,
    }
    if not (go_on and file.path.exists()):
        return file.begin({**settings, "seed": design.seed})
    study = file.resume({**settings, "seed": design.seed} if seed_given else settings)
    for name, spec in design.workloads.items():
        kept = study.workloads.get(name)
        if kept is not None and kept.spec != spec:
            raise ConfigError(f"continue: in the kept study {name} is {kept.spec}", field="continue")
    return study


def _loads(text: str) -> list[float]:
    loads = decimals(text, "loads")
    if not loads or not all(0 < load <= 10 for load in loads):
        raise ConfigError(f"loads={text}: expected shares of the capacity, as in 0.7 1.0", field="loads")
    return loads
