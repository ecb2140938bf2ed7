"""`python -m loadtest baseline`."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import loadtest
from loadtest import options
from loadtest.baseline.interleaved import best_of_each_system
from loadtest.baseline.outcome import COLUMNS, NOTE, common_rate, outcome_rows, title, write_figures, write_outcome
from loadtest.baseline.study import Study, run_study
from loadtest.commands import EXIT_INTERRUPTED, EXIT_OK, with_interrupt
from loadtest.options import RunOptions, duration_s
from loadtest.rate_search import SearchSpace
from loadtest.results import REPORT, prepare_folder
from loadtest.rig.command_line import Option, choice
from loadtest.rig.markdown import table
from loadtest.rig.models import SERVED, write_model
from loadtest.run import plan_run
from loadtest.schedule import Limits
from loadtest.slo import parse_duration_s
from shared.errors import ConfigError

_SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
_LONG_PROMPTS = "random:input=64-256@0.7+1024-1984@0.3,output=16-48"
_RATE_STEP = 1.5
"""The search starts near the limit, so it takes small steps."""
_STARTS_S, _NUM_POINTS = 120.0, 51
"""Three systems with a handful of rates each, twice, are some forty points; a point takes its duration and the wait for
its last answers."""


def baseline(
    out: Annotated[Path | None, Option("folder for the results; default: out/loadtest/DATE-TIME")] = None,
    trace: Annotated[
        Path, Option("Mooncake JSON lines, or Azure's .csv; default: the slice that comes along")
    ] = _SLICE,
    scale: options.Scale = 32,
    scale_output: Annotated[int, Option("divides a trace's answer lengths")] = 8,
    duration: Annotated[str, Option("how long requests are offered: seconds, or 90s, 5m")] = "10s",
    budget: Annotated[str | None, Option("for the whole study; default: 2 minutes and 51 durations")] = None,
    rate: Annotated[float | None, Option("first rate of the search, requests per second; default: calibrated")] = None,
    slo: Annotated[str | None, Option("default: calibrated on one request at a time")] = None,
    chunks: Annotated[str, Option("chunk budgets to try for every system, tokens a step")] = "128,512",
    shape: Annotated[str, Option(f"random weights in this shape: {', '.join(SERVED)}")] = "s",
    model: Annotated[Path | None, Option("a model's folder instead")] = None,
    tokenizer: Annotated[Path, Option("model whose tokenizer a shape takes")] = Path("models/demo"),
    num_kv_blocks: Annotated[int, Option("KV blocks of all workers of a system together")] = 2048,
    tolerance: Annotated[float, Option("percent by which a result may be below the true limit")] = 15.0,
    max_points: Annotated[int, Option("rates to measure at most, a search")] = 7,
    seed: options.Seed = None,
    vocab_size: options.VocabSize = 1000,
    json: Annotated[Path | None, Option("writes the figures there too")] = None,
) -> int:
    """Compare disaggregated with collocated serving on this machine's cores, by maximum goodput."""
    out = out if out is not None else Path("out", "loadtest", time.strftime("%Y%m%d-%H%M%S"))
    chunk_lens = _chunk_lens(chunks)
    start_rate = 1.0 if rate is None else rate
    space = SearchSpace(
        start_rate, min(0.1, start_rate), tolerance=tolerance / 100, max_points=max_points, step=_RATE_STEP
    )
    point_s = duration_s(duration)
    budget_s = _STARTS_S + _NUM_POINTS * point_s if budget is None else parse_duration_s(budget, "budget")
    load = RunOptions(
        target="grpc://127.0.0.1:1",  # replaced by each system's own
        workload="",
        arrivals="poisson",  # whatever the trace's own times: these come in steps of 3 s
        scale=scale,
        scale_output=scale_output,
        seed=seed,
        vocab_size=vocab_size,
        request_timeout="20s",
        warmup=2,
    )
    config = load.config(slo, load.traffic(start_rate), Limits(point_s))
    # One seed for both, fresh or given: every system gets the same requests.
    workloads = {"trace": _trace(trace), "long-prompts": _LONG_PROMPTS}
    configs = [(name, replace(config, workload=workload)) for name, workload in workloads.items()]
    for _, each in configs:
        plan_run(each)
    choice(shape, "shape", SERVED)
    prepare_folder(out)
    with tempfile.TemporaryDirectory(prefix="tandem-baseline-") as scratch:
        if model is None:
            model = write_model(Path(scratch) / f"random-{shape}", SERVED[shape], tokenizer)
        study = Study(model, configs, space, rate, chunk_lens, num_kv_blocks, out, budget_s)
        measured, interrupted = with_interrupt(lambda stop: run_study(study, stop))
    write_outcome(out, measured)
    for name, candidates in measured.items():
        best = best_of_each_system(candidates)
        common = common_rate(best)
        print(f"\n{title(name, common)}\n\n{table(COLUMNS, outcome_rows(best, common))}")
    print(f"\n{NOTE}")
    for name, candidates in measured.items():
        if candidates:
            print(f"report: {out / name / REPORT}")
    if json is not None:
        write_figures(json, measured)
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


def _trace(path: Path) -> str:
    """The workload of a trace's file, named as results should name it."""
    kind = "azure" if path.suffix == ".csv" else "mooncake"
    return f"{kind}:{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"


def _chunk_lens(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) >= 16 for part in parts):
        raise ConfigError(f"chunks={text}: expected token counts of 16 or more, as in 128,512", field="chunks")
    return [int(part) for part in parts]
