"""`python -m loadtest.simulator.planning --trace FILE | --day`: the planner beside a clairvoyant schedule."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, Out, decimals, integers
from loadtest.rig.command_line import run as run_command
from loadtest.rig.markdown import table
from loadtest.rig.results import Result, write
from loadtest.simulator.cli import FleetOptions, WorkerOptions, setup_of
from loadtest.simulator.outcome import Targets
from loadtest.simulator.planning.clairvoyant import Clairvoyant, cheapest
from loadtest.simulator.planning.day import Day, day_trace
from loadtest.simulator.planning.elastic_pool import Lifecycle
from loadtest.simulator.planning.run import ElasticOutcome, ElasticSetup, planned
from loadtest.workloads.trace import TraceRequest, parse_slice, slice_requests
from loadtest.workloads.trace_json import read_json_trace
from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig, PoolLimits
from shared.errors import ConfigError

_WORKER, _FLEET = WorkerOptions(), FleetOptions()
_WINDOW_S = 300.0
_SETTLED_S = 1800.0
"""By then a planner that knew nothing has found its size: at constant load it changes nothing afterwards."""


def main(
    trace: Annotated[Path | None, Option(help="Mooncake's JSON lines")] = None,
    unit: Annotated[str, Option(help="of their timestamps, where these are not ms: s")] = "",
    slice_: Annotated[str, Option(name="slice", help="START:END of the trace, seconds")] = "",
    day: Annotated[bool, Option(name="day", help="a synthetic day, compressed, in place of a trace")] = False,
    swing: Annotated[float, Option(help="of the day: how far it goes from its mean; 0 = constant load")] = 0.7,
    begin: Annotated[str, Option(help="prefill and decode workers at the start")] = "1 1",
    budget: Annotated[int, Option(help="GPUs")] = 256,
    decode_sequences: Annotated[float, Option(help="the planner's setting")] = 80.0,
    attainment: Annotated[float, Option(help="share of requests that should meet both targets")] = 0.95,
    prefill_margins: Annotated[str, Option(help="the schedule's, to choose from")] = "0.9 1 1 1.1",
    decode_margins: Annotated[str, Option(help="likewise, as many")] = "1.35 1.3 1.35 1.35",
    ttft: Annotated[float, Option(help="target, seconds")] = _FLEET.ttft_s,
    tpot: Annotated[float, Option(help="target, seconds")] = _FLEET.tpot_s,
    model: Annotated[str, Option()] = _WORKER.model,
    gpus: Annotated[int, Option(help="H200s a worker (tensor parallel)")] = _WORKER.gpus,
    seeds: Annotated[str, Option(help="a run for each")] = "0",
    out: Out = None,
) -> None:
    """Size a simulated fleet by the planner, and by the cheapest schedule that knows the future."""
    fleet = setup_of(WorkerOptions(model=model, gpus=gpus), FleetOptions(ttft_s=ttft, tpot_s=tpot))
    limits = PoolLimits(gpus_per_worker=gpus)
    config = PlannerConfig(
        prefill=limits, decode=limits, gpu_budget=budget, ttft_s=ttft, tpot_s=tpot, attainment=attainment,
        decode_sequences=decode_sequences, start_s=Lifecycle().start_s,
    )  # fmt: skip
    sizes = decimals(begin, "begin")
    if len(sizes) != 2 or min(sizes) < 1:
        raise ConfigError("two numbers of at least 1", field="begin")
    margins = list(
        zip(decimals(prefill_margins, "prefill-margins"), decimals(decode_margins, "decode-margins"), strict=True)
    )
    rows: list[list[str]] = []
    results: list[Result] = []
    for seed in integers(seeds, "seeds"):
        requests = _requests(trace, unit, slice_, day, swing, seed)
        setup = ElasticSetup(fleet.worker, gpus, Targets(ttft, tpot), fleet.tandem, seed=seed)
        ours = planned(requests, setup, Pair(*map(int, sizes)), config)
        for at_s, decision in ours.decisions:
            print(f"{at_s:6.0f} s  {decision}", file=sys.stderr)
        print(f"planner {ours.attainment:.2%}, {ours.gpu_hours:.1f} GPU hours", file=sys.stderr)
        best: Clairvoyant | None = None
        for best in cheapest(requests, setup, attainment, margins, decode_sequences, _WINDOW_S):
            print(f"schedule {best.outcome.attainment:.2%}, {best.outcome.gpu_hours:.1f} GPU hours", file=sys.stderr)
        rows.append(_row(f"seed {seed}: planner, {len(requests)} requests", ours, best.outcome if best else None))
        if best is not None:
            rows.append(_row(f"schedule ({best.prefill_margin:g}, {best.decode_margin:g})", best.outcome, None))
        results += _results(f"seed {seed}", ours, best)
    print(f"targets TTFT {ttft:g} s TPOT {tpot * 1e3:g} ms\n")
    print(table(_HEADERS, rows))
    if out is not None:
        write(out, results)


_HEADERS = (
    "", "attained", "GPU hours", "of the schedule's", "changes", f"after {_SETTLED_S / 60:g} min",
    "shortest time between turns", "most GPUs",
)  # fmt: skip


def _requests(trace: Path | None, unit: str, slice_: str, day: bool, swing: float, seed: int) -> Sequence[TraceRequest]:
    if (trace is None) == (not day):
        raise ConfigError("either --trace or --day", field="trace")
    if trace is None:
        return day_trace(Day(swing=swing), seed)
    requests = slice_requests(read_json_trace(trace, unit), parse_slice(slice_))
    if not requests:
        raise ConfigError("the slice of the trace has no requests", field="slice")
    return requests


def _row(name: str, outcome: ElasticOutcome, best: ElasticOutcome | None) -> list[str]:
    turn_s = outcome.shortest_turn_s
    return [
        name,
        f"{outcome.attainment:.2%}",
        f"{outcome.gpu_hours:.1f}",
        f"{outcome.gpu_hours / best.gpu_hours:.2f}" if best is not None else "",
        f"{outcome.num_changes()}",
        f"{outcome.num_changes(_SETTLED_S)}",
        f"{turn_s:.0f} s" if math.isfinite(turn_s) else "",
        f"{outcome.max_gpus}",
    ]


def _results(name: str, ours: ElasticOutcome, best: Clairvoyant | None) -> list[Result]:
    hours = Result(f"{name}, planner: GPU hours", ours.gpu_hours, "h")
    results = [Result(f"{name}, planner: attainment", ours.attainment, "share"), hours]
    if best is not None:
        schedule = f"schedule ({best.prefill_margin:g}, {best.decode_margin:g})"
        results[1] = replace(hours, peer=schedule, ratio=best.outcome.gpu_hours / ours.gpu_hours)
        results.append(Result(f"{name}, {schedule}: attainment", best.outcome.attainment, "share"))
        results.append(Result(f"{name}, {schedule}: GPU hours", best.outcome.gpu_hours, "h"))
    if math.isfinite(ours.shortest_turn_s):
        results.append(Result(f"{name}, planner: shortest time between turns", ours.shortest_turn_s, "s"))
    return [
        *results,
        Result(f"{name}, planner: changes", ours.num_changes(), ""),
        Result(f"{name}, planner: changes after {_SETTLED_S / 60:g} min", ours.num_changes(_SETTLED_S), ""),
        Result(f"{name}, planner: most GPUs", ours.max_gpus, ""),
    ]


if __name__ == "__main__":
    run_command(main, name="python -m loadtest.simulator.planning")
