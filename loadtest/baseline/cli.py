"""`python -m loadtest baseline`."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from loadtest import options
from loadtest.baseline.fleet import Fleet
from loadtest.baseline.outcome import cells_of, write_outcome
from loadtest.baseline.study import TIME, Design, run_study
from loadtest.baseline.systems import (
    Hardware,
    System,
    adaptive,
    collocated,
    default_splits,
    disaggregated,
    speculating,
)
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

CHUNKS = f"128 512 {TIME}"
"""Chunk budgets that are tried by default."""
WITHOUT_GUESSES = {
    "prefill": "all workers are collocated",
    "auto": "what is compared with the collocated workers is the same workers with guesses",
    "chunks": f"both have chunks by {TIME}",
    "model": "its answers have to be known; shape says how large it is",
}
"""Options of SystemOptions that a comparison of workers that guess excludes, and why."""
WANTED = 300
"""Requests of a system at a load, below which nothing is named."""


@dataclass(frozen=True)
class SystemOptions:
    """What is compared, and on what it runs."""

    workers: Annotated[int, Option("of every system")] = 2
    prefill: Annotated[str, Option("prefill workers of the fixed splits; default: a quarter, half, three quarters")] = (
        ""
    )
    auto: Annotated[bool | None, Option("measure mode auto too, the default; without it only the fixed systems")] = None
    speculation: Annotated[
        str,
        Option(
            "compare collocated workers with this setting (auto, ngram) to those without guesses, in place of splits "
            "and modes; they serve the model of SHAPE (default 125m) that gives each token its successor. Excludes "
            f"{', '.join(f'--{name}' for name in WITHOUT_GUESSES)}"
        ),
    ] = ""
    chunks: Annotated[
        str,
        Option(f"chunk budgets to try for fixed systems, tokens; {TIME}: as the TPOT target allows; default: {CHUNKS}"),
    ] = ""
    device: Annotated[str, Option("of every worker; timed:FILE: steps take the time in FILE and compute nothing")] = (
        "cpu"
    )
    model: Annotated[Path | None, Option(f"model folder; default: {DEMO.name}")] = None
    shape: Annotated[str, Option(f"random weights of this shape instead: {', '.join(SERVED)}")] = ""
    num_kv_blocks: Annotated[int, Option("KV blocks of each worker")] = 1024

    @property
    def label(self) -> str:
        """What reports call the system."""
        return f"{self.workers} workers, {self.device}, {self._shape or self._folder.name}"

    @property
    def settings(self) -> dict[str, object]:
        """Settings that must be the same where a kept study is continued."""
        common: dict[str, object] = {
            "model": self._shape or str(self._folder),
            "device": self.device,
            "num_kv_blocks": self.num_kv_blocks,
        }
        return common | ({"speculation": self.speculation} if self.speculation else {})

    def splits(self) -> Sequence[System]:
        """The fixed splits, none beside guesses; raises ConfigError (`prefill`)."""
        if self.speculation:
            return []
        splits = integers(self.prefill, "prefill") or default_splits(self.workers)
        if self.workers < 2 or not all(1 <= split < self.workers for split in splits):
            raise ConfigError("workers must be at least 2, and every split leaves one of each role", field="prefill")
        return [disaggregated(split, self.workers) for split in splits]

    def adaptive(self) -> System | None:
        """What is compared with the best fixed system."""
        if self.speculation:
            return speculating(self.workers, self.speculation)
        return None if self.auto is False else adaptive(self.workers)

    def budgets(self) -> Sequence[str]:
        """Chunk budgets to try, tokens or TIME; raises ConfigError (`chunks`)."""
        return [TIME] if self.speculation else _chunks(self.chunks or CHUNKS)

    def check(self) -> None:
        """Raises ConfigError (`speculation`, `shape`, or the option that `speculation` excludes)."""
        if self.speculation:
            choice(self.speculation, "speculation", ("auto", "ngram"))
            for name, why in WITHOUT_GUESSES.items():
                if getattr(self, name) not in ("", None):
                    raise ConfigError(f"{name} and speculation exclude each other: {why}", field=name)
        if self._shape:
            choice(self._shape, "shape", SHAPES if self.speculation else SERVED)

    def hardware(self, scratch: Path) -> Hardware:
        """What all systems run on; a model of a shape is written to `scratch`."""
        return Hardware(self._written(scratch), self.device, self.num_kv_blocks)

    @property
    def _folder(self) -> Path:
        return self.model or DEMO

    @property
    def _shape(self) -> str:
        return self.shape or ("125m" if self.speculation else "")

    def _written(self, scratch: Path) -> Path:
        if self.speculation:
            from loadtest.rig.successors import successors  # here: the command starts without torch

            return successors(self._shape)
        return write_model(scratch / self.shape, SERVED[self.shape], self._folder) if self.shape else self._folder


@dataclass(frozen=True)
class LoadOptions:
    """Which requests the systems get, and how many."""

    workloads: Annotated[
        str,
        Option(f"{', '.join(WORKLOADS)}, or NAME=SPEC; with SPECULATION {', '.join(OF_GUESSES)}; default: all of them"),
    ] = ""
    loads: Annotated[str, Option("shares of the capacity, which is calibrated for each workload")] = "0.7 1.0 1.3"
    rounds: Annotated[int, Option("windows of every system at every load", at_least=1)] = 8
    requests: Annotated[int, Option("least number of requests of a window", at_least=1)] = 50
    window: Annotated[str, Option("least time of a window, in which more requests may come")] = "2s"
    warm_up: Annotated[int, Option("requests of every system before its first round", at_least=0)] = 0
    slo: Annotated[str | None, Option("default: 3 times one request alone, for each workload")] = None
    vocab_size: options.VocabSize = 1000
    seed: options.Seed = None


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
    file = WindowFile(out.with_suffix(".windows.jsonl"))
    study = _study(file, design, systems.settings, go_on, load.seed is not None)
    design = replace(design, seed=study.settings["seed"])
    with tempfile.TemporaryDirectory(prefix="tandem-loadtest-") as scratch:
        fleet = Fleet(systems.hardware(Path(scratch)), out.with_suffix(".logs"))
        stopped, interrupted = with_interrupt(lambda stop: run_study(design, study, file, fleet, budget_s, stop))
    cells = cells_of(design, study, WANTED, within / 100)
    origin = f"{systems.label} · seed {design.seed}"
    text = write_outcome(out, design, cells, f"{origin} · {design.commit}", stopped)
    print(f"\n{text}\nfigures: {out}, page: {out.with_suffix('.html')}")
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


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


def _chunks(text: str) -> Sequence[str]:
    chunks = text.replace(",", " ").split()
    if not chunks or not all(chunk == TIME or (chunk.isdecimal() and int(chunk) >= 16) for chunk in chunks):
        raise ConfigError(
            f"chunks={text}: expected token counts of 16 or more or {TIME}, as in 128 512", field="chunks"
        )
    return chunks
