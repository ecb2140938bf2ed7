"""`python -m loadtest baseline`."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from loadtest import options
from loadtest.baseline.fleet import Fleet
from loadtest.baseline.outcome import cells_of, write_outcome
from loadtest.baseline.study import TIME, Design, run_study
from loadtest.baseline.systems import Hardware, adaptive, collocated, default_splits, disaggregated, speculating
from loadtest.baseline.windows import Study, WindowFile
from loadtest.baseline.workloads import OF_GUESSES, WORKLOADS, WindowSize, parse_workloads, window_plan
from loadtest.commands import EXIT_INTERRUPTED, EXIT_OK, with_interrupt
from loadtest.config import MAX_SEED
from loadtest.options import duration_s
from loadtest.rig.command_line import Option, choice, decimals, integers
from loadtest.rig.models import DEMO, SERVED, SHAPES, write_model
from loadtest.rig.results import commit
from loadtest.slo import Slo, parse_slo
from shared.errors import ConfigError

WANTED = 300
"""Requests of a system at a load, below which nothing is named."""


def baseline(
    out: Annotated[
        Path | None,
        Option("JSON file for the figures, with tables, page and windows beside it; default: in out/", writes="file"),
    ] = None,
    go_on: Annotated[
        bool, Option("keep the windows beside OUT, and measure what is missing or more", name="continue")
    ] = False,
    workloads: Annotated[
        str,
        Option(f"{', '.join(WORKLOADS)}, or NAME=SPEC; with SPECULATION {', '.join(OF_GUESSES)}; default: all of them"),
    ] = "",
    loads: Annotated[str, Option("shares of the capacity, which is calibrated for each workload")] = "0.7 1.0 1.3",
    rounds: Annotated[int, Option("windows of every system at every load", at_least=1)] = 8,
    requests: Annotated[int, Option("least number of requests of a window", at_least=1)] = 50,
    window: Annotated[str, Option("least time of a window, in which more requests may come")] = "2s",
    warm_up: Annotated[int, Option("requests of every system before its first round", at_least=0)] = 0,
    budget: Annotated[str, Option("time for everything; what does not fit is not measured")] = "14m",
    within: Annotated[
        float, Option("percent: an interval up to ± this shows that there is no difference", at_least=0)
    ] = 5.0,
    slo: Annotated[str | None, Option("default: 3 times one request alone, for each workload")] = None,
    workers: Annotated[int, Option("of every system")] = 2,
    prefill: Annotated[
        str, Option("prefill workers of the fixed splits; default: a quarter, half, three quarters")
    ] = "",
    auto: Annotated[bool, Option("measure mode auto too; without it only the fixed systems")] = True,
    speculation: Annotated[
        str,
        Option(
            "compare collocated workers with this setting (auto, ngram) to those without guesses, in place of splits "
            "and modes; they serve the model of SHAPE (default 125m) that gives each token its successor"
        ),
    ] = "",
    chunks: Annotated[
        str, Option(f"chunk budgets to try for fixed systems, tokens; {TIME}: as the TPOT target allows")
    ] = f"128 512 {TIME}",
    device: Annotated[str, Option("of every worker; timed:FILE: steps take the time in FILE and compute nothing")] = (
        "cpu"
    ),
    model: Annotated[Path, Option("model folder")] = DEMO,
    shape: Annotated[str, Option(f"random weights of this shape instead: {', '.join(SERVED)}")] = "",
    num_kv_blocks: Annotated[int, Option("KV blocks of each worker")] = 1024,
    vocab_size: options.VocabSize = 1000,
    seed: options.Seed = None,
    traces: Annotated[
        Path | None, Option("folder for each window's requests, as the simulator reads them", writes="folder")
    ] = None,
) -> int:
    """Compare ways to use this machine's workers by goodput, under the same requests at fixed loads."""
    out = out if out is not None else Path("out", "loadtest", time.strftime("%Y%m%d-%H%M%S"), "figures.json")
    budget_s = duration_s(budget)
    if budget_s <= 0:
        raise ConfigError(f"budget must be above 0s, got {budget}", field="budget")
    splits = integers(prefill, "prefill") or default_splits(workers)
    if speculation:
        choice(speculation, "speculation", ("auto", "ngram"))
        splits, workloads, chunks = [], workloads or " ".join(OF_GUESSES), TIME
    elif workers < 2 or not all(1 <= split < workers for split in splits):
        raise ConfigError("workers must be at least 2, and every split leaves one of each role", field="prefill")
    named = parse_workloads(workloads or " ".join(WORKLOADS))
    guessing = speculating(workers, speculation) if speculation else None
    design = Design(
        workloads=named,
        loads=_loads(loads),
        collocated=collocated(workers),
        splits=[disaggregated(split, workers) for split in splits],
        adaptive=guessing or (adaptive(workers) if auto else None),
        chunks=_chunks(chunks),
        rounds=rounds,
        size=WindowSize(requests, duration_s(window)),
        slo=None if slo is None else parse_slo(slo),
        seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
        vocab_size=vocab_size,
        commit=commit(),
        traces=traces,
        warm_up=warm_up,
    )
    for spec in named.values():  # errors in it show before anything starts
        window_plan(spec, Slo(1.0), 1.0, design.size, design.seed, vocab_size)
    shape = shape or ("125m" if speculation else "")
    if shape:
        choice(shape, "shape", SHAPES if speculation else SERVED)
    file = WindowFile(out.with_suffix(".windows.jsonl"))
    common: dict[str, object] = {"model": shape or str(model), "device": device, "num_kv_blocks": num_kv_blocks}
    if speculation:
        common["speculation"] = speculation
    study = _study(file, design, common, go_on, seed is not None)
    design = replace(design, seed=study.settings["seed"])
    with tempfile.TemporaryDirectory(prefix="tandem-loadtest-") as scratch:
        served = _served(model, shape, Path(scratch), is_guessed=bool(speculation))
        fleet = Fleet(Hardware(served, device, num_kv_blocks), out.with_suffix(".logs"))
        stopped, interrupted = with_interrupt(lambda stop: run_study(design, study, file, fleet, budget_s, stop))
    cells = cells_of(design, study, WANTED, within / 100)
    origin = f"{workers} workers, {device}, {shape or model.name} · seed {design.seed} · {design.commit}"
    print(f"\n{write_outcome(out, design, cells, origin, stopped)}\nfigures: {out}, page: {out.with_suffix('.html')}")
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


def _served(model: Path, shape: str, scratch: Path, *, is_guessed: bool) -> Path:
    if is_guessed:
        from loadtest.bench.speculation.successors import successors  # imported here: the command starts without torch

        return successors(shape)
    return write_model(scratch / shape, SERVED[shape], model) if shape else model


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


def _chunks(text: str) -> Sequence[str]:
    chunks = text.replace(",", " ").split()
    if not chunks or not all(chunk == TIME or (chunk.isdecimal() and int(chunk) >= 16) for chunk in chunks):
        raise ConfigError(
            f"chunks={text}: expected token counts of 16 or more or {TIME}, as in 128 512", field="chunks"
        )
    return chunks
