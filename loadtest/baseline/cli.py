"""`python -m loadtest baseline`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import loadtest
from loadtest import options
from loadtest.baseline.interleaved import Candidate, best_of_each_system
from loadtest.baseline.outcome import COLUMNS, NOTE, common_rate, outcome_rows, title, write_figures, write_outcome
from loadtest.baseline.study import Study, run_study
from loadtest.commands import EXIT_INTERRUPTED, EXIT_OK, with_interrupt
from loadtest.config import LoadConfig, Traffic
from loadtest.rate_search import SearchSpace
from loadtest.results import REPORT, prepare_folder
from loadtest.rig.models import SERVED, Shape, write_model
from loadtest.run import plan_run
from loadtest.schedule import Limits
from loadtest.slo import parse_duration_s
from shared.errors import ConfigError

_SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
_LONG_PROMPTS = "random:input=64-256@0.7+1024-1984@0.3,output=16-48"
_REQUEST_TIMEOUT_S = 20.0
_RATE_STEP = 1.5
"""The search starts near the limit, so it takes small steps."""
_STARTS_S, _NUM_POINTS = 120.0, 51
_TABLE_WIDTH = 124
"""Width of the output: wrapped lines are easier to read than columns of four letters."""


def baseline(
    out: Annotated[
        Path | None, typer.Option(help="folder for the results; default: out/loadtest/DATE-TIME", show_default=False)
    ] = None,
    trace: Annotated[
        Path,
        typer.Option(
            help="Mooncake JSON lines, or Azure's .csv; default: the slice that comes along", show_default=False
        ),
    ] = _SLICE,
    scale: options.Scale = 32,
    scale_output: Annotated[int, typer.Option(help="divides a trace's answer lengths")] = 8,
    duration: options.Duration = "10s",
    budget: Annotated[
        str | None, typer.Option(help="for the whole study; default: 2 minutes and 51 durations", show_default=False)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="first rate of the search, requests per second; default: calibrated")
    ] = None,
    slo: Annotated[str | None, typer.Option("--slo", help="default: calibrated on one request at a time")] = None,
    chunks: Annotated[str, typer.Option(help="chunk budgets to try for every system, tokens a step")] = "128,512",
    shape: Annotated[str, typer.Option(help=f"random weights in this shape: {', '.join(SERVED)}")] = "s",
    model: Annotated[Path | None, typer.Option(help="a model's folder instead")] = None,
    tokenizer: Annotated[Path, typer.Option(help="model whose tokenizer a shape takes")] = Path("models/demo"),
    num_kv_blocks: Annotated[int, typer.Option(help="KV blocks of all workers of a system together")] = 2048,
    tolerance: Annotated[float, typer.Option(help="percent by which a result may be below the true limit")] = 15.0,
    max_points: Annotated[int, typer.Option(help="rates to measure at most, a search")] = 7,
    seed: options.Seed = None,
    vocab_size: options.VocabSize = 1000,
    json_: Annotated[Path | None, typer.Option("--json", help="writes the figures there too")] = None,
) -> None:
    """Compare disaggregated with collocated serving on this machine's cores, by maximum goodput."""
    out = out if out is not None else Path("out", "loadtest", time.strftime("%Y%m%d-%H%M%S"))
    chunk_lens = _chunk_lens(chunks)
    start_rate = 1.0 if rate is None else rate
    space = SearchSpace(
        start_rate, min(0.1, start_rate), tolerance=tolerance / 100, max_points=max_points, step=_RATE_STEP
    )
    limits = options.make_limits(duration, None)
    budget_s = _budget_s(limits, budget)
    kind = "azure" if trace.suffix == ".csv" else "mooncake"
    if trace.is_relative_to(Path.cwd()):
        trace = trace.relative_to(Path.cwd())  # as results should name it
    configs = [
        (name, _config(workload, slo, limits, start_rate, seed, scale, scale_output, vocab_size))
        for name, workload in (("trace", f"{kind}:{trace}"), ("long-prompts", _LONG_PROMPTS))
    ]
    # One seed for all, fresh or given: every system gets the same requests.
    configs = [(name, options.with_seed(config, configs[0][1].seed)) for name, config in configs]
    for _, config in configs:
        plan_run(config)
    made = _shape(shape)
    prepare_folder(out)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    with tempfile.TemporaryDirectory(prefix="tandem-baseline-") as scratch:
        if model is None:
            model = Path(scratch) / f"random-{shape}"
            write_model(model, made, tokenizer)
        study = Study(model, configs, space, rate, chunk_lens, num_kv_blocks, out, budget_s)
        measured, interrupted = with_interrupt(lambda stop: run_study(study, stop, console))
    write_outcome(out, measured)
    for name, candidates in measured.items():
        _print(console, name, best_of_each_system(candidates))
    console.print(NOTE, highlight=False)
    for name, candidates in measured.items():
        if candidates:
            console.print(f"report: {out / name / REPORT}", highlight=False, markup=False, soft_wrap=True)
    if json_ is not None:
        write_figures(json_, measured)
    raise typer.Exit(EXIT_INTERRUPTED if interrupted else EXIT_OK)


def _print(console: Console, name: str, best: Sequence[Candidate]) -> None:
    rate = common_rate(best)
    table = Table(title=title(name, rate), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for row in outcome_rows(best, rate):
        table.add_row(*row)
    console.print(table)


def _budget_s(limits: Limits, budget: str | None) -> float:
    """Seconds for the whole study. Three systems with a handful of rates each, twice, are some forty points; a point
    takes its duration and the wait for its last answers."""
    if budget is not None:
        return parse_duration_s(budget, "budget")
    assert limits.duration_s is not None, "the option has a default"
    return _STARTS_S + _NUM_POINTS * limits.duration_s


def _config(
    workload: str,
    slo: str | None,
    limits: Limits,
    rate: float,
    seed: int | None,
    scale: int,
    scale_output: int,
    vocab_size: int,
) -> LoadConfig:
    """A workload's config; its arrivals are Poisson, whatever the trace's own times: these come in steps of 3 s."""
    return options.make_config(
        target="grpc://127.0.0.1:1",
        workload=workload,
        slo=slo,
        traffic=Traffic(arrivals="poisson", rate=rate),
        limits=limits,
        seed=seed,
        slice_="",
        scale=scale,
        scale_output=scale_output,
        model="",
        vocab_size=vocab_size,
        ignore_eos=True,
        request_timeout=f"{_REQUEST_TIMEOUT_S}s",
        give_up="5s",
        max_lag=None,
        warmup=2,
        label="",
    )


def _chunk_lens(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) >= 16 for part in parts):
        raise ConfigError(f"chunks={text}: expected token counts of 16 or more, as in 128,512", field="chunks")
    return [int(part) for part in parts]


def _shape(name: str) -> Shape:
    if name not in SERVED:
        raise ConfigError(f"shape must be one of {', '.join(SERVED)}, got {name!r}", field="shape")
    return SERVED[name]
