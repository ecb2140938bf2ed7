"""`python -m loadtest.bench parallel`: what splitting a model over processes of this machine costs and gives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from loadtest.bench.engine.cpu import DTYPES
from loadtest.bench.parallel.hosts import measure_hosts
from loadtest.bench.parallel.steps import measure_steps
from loadtest.bench.parallel.sums import measure_sums
from loadtest.rig.command_line import Option, Out, choice, integers
from loadtest.rig.models import SHAPES, checkpoint
from loadtest.rig.results import Report, machine
from shared.model.ranks.shard import Degrees


def main(
    model: Annotated[str, Option(help=f"model folder or shape ({', '.join(SHAPES)}); empty = sums alone")] = "1b",
    dtype: Annotated[str, Option(help="of weights and computation: bf16 or fp32")] = "fp32",
    ranks: Annotated[str, Option(help="numbers of ranks whose sums are measured")] = "2",
    ep: Annotated[str, Option(help="expert-parallel degrees of the steps, for models with experts")] = "1",
    pairs: Annotated[int, Option(help="pairs of runs")] = 5,
    repeats: Annotated[int, Option(help="sums of 64 KiB in a run; fewer of larger ones")] = 400,
    out: Out = None,
) -> None:
    """Measure sums over ranks beside gloo, messages between two hosts, and steps at tp 2 beside one process with two
    threads."""
    choice(dtype, "dtype", DTYPES)
    expert_degrees = integers(ep, "ep")
    report = Report(out)
    for count in integers(ranks, "ranks"):
        report.add(measure_sums(count, pairs, repeats))
    report.add(measure_hosts(pairs, repeats))
    if model:
        folder = checkpoint(model) if model in SHAPES else Path(model)
        for expert in expert_degrees:
            report.add(measure_steps(folder, DTYPES[dtype], Degrees(2, expert=expert), pairs))
    print(f"{machine()}\n")
    report.print()
    print("\nLimit of a sum: one copy of the same bytes; of a message between hosts: within one.")
