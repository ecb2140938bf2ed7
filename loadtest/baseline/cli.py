"""`python -m loadtest baseline`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import loadtest
from loadtest import options
from loadtest.baseline.model import SHAPES, Shape, write_model
from loadtest.baseline.outcome import COLUMNS, outcome_rows, write_outcome
from loadtest.baseline.study import Study, run_study
from loadtest.commands import EXIT_INTERRUPTED, EXIT_OK, with_interrupt
from loadtest.config import LoadConfig, Traffic
from loadtest.rate_search import SearchSpace
from loadtest.results import REPORT, prepare_folder
from loadtest.run import plan_run
from loadtest.schedule import Limits
from shared.errors import ConfigError

_SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
_LONG_PROMPTS = "random:input=64-256@0.7+1024-1984@0.3,output=16-48"
_REQUEST_TIMEOUT_S = 30.0


def baseline(
    out: options.Out,
    trace: Annotated[
        Path, typer.Option(help="Mooncake JSON lines; default: the slice that comes along", show_default=False)
    ] = _SLICE,
    scale: options.Scale = 32,
    scale_output: Annotated[int, typer.Option(help="divides a trace's answer lengths")] = 8,
    duration: options.Duration = "12s",
    rate: Annotated[float, typer.Option(help="where the search begins, requests per second")] = 2.0,
    slo: Annotated[str | None, typer.Option("--slo", help="default: calibrated on one request at a time")] = None,
    chunks: Annotated[str, typer.Option(help="chunk budgets to try for every system, tokens a step")] = "128,512",
    shape: Annotated[str, typer.Option(help=f"random weights in this shape: {', '.join(SHAPES)}")] = "s",
    model: Annotated[Path | None, typer.Option(help="a model's folder instead")] = None,
    tokenizer: Annotated[Path, typer.Option(help="model whose tokenizer a shape takes")] = Path("models/demo"),
    num_kv_blocks: Annotated[int, typer.Option(help="KV blocks of all workers of a system together")] = 4096,
    tolerance: Annotated[float, typer.Option(help="percent by which an answer may lie below the limit")] = 15.0,
    max_points: Annotated[int, typer.Option(help="rates to measure at most, a search")] = 7,
    seed: options.Seed = None,
    vocab_size: options.VocabSize = 1000,
) -> None:
    """Compare disaggregated with collocated serving on this machine's cores, by maximum goodput."""
    chunk_lens = _chunk_lens(chunks)
    space = SearchSpace(start_rate=rate, min_rate=min(0.1, rate), tolerance=tolerance / 100, max_points=max_points)
    limits = options.make_limits(duration, None)
    configs = [
        (name, _config(workload, slo, limits, rate, seed, scale, scale_output, vocab_size))
        for name, workload in (("trace", f"mooncake:{trace}"), ("long-prompts", _LONG_PROMPTS))
    ]
    # Fresh or given, one seed is for all: every system gets the same requests.
    configs = [(name, options.with_seed(config, configs[0][1].seed)) for name, config in configs]
    for _, config in configs:
        plan_run(config)
    prepare_folder(out)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="tandem-baseline-") as scratch:
        if model is None:
            model = Path(scratch) / f"random-{shape}"
            write_model(model, _shape(shape), tokenizer)
        study = Study(model, configs, space, chunk_lens, num_kv_blocks, out, state_dir=out)
        measured, interrupted = with_interrupt(lambda stop: run_study(study, stop, console))
    write_outcome(out, measured)
    for name, found in measured.items():
        table = Table(*COLUMNS, title=name, title_justify="left")
        for row in outcome_rows(found):
            table.add_row(*row)
        console.print(table)
        console.print(f"report: {out / name / REPORT}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(EXIT_INTERRUPTED if interrupted else EXIT_OK)


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
    if name not in SHAPES:
        raise ConfigError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}", field="shape")
    return SHAPES[name]
