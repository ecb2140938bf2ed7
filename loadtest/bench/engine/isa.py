"""Steps of the engine with each instruction set and dtype in turns: what fewer vectors lose, which dtype is faster.

On one thread, in CPU time, so that other processes on a shared machine count less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from loadtest.bench.engine.cpu import DTYPES, Bench, Step
from loadtest.bench.shapes import SHAPES, checkpoint
from loadtest.command_line import names, run
from loadtest.figures import machine
from shared.engine.plan import StepPlan
from shared.kernels.cpu import isa

STEPS = (Step(1, 0, 512), Step(1, 256, 1), Step(8, 256, 1), Step(32, 256, 1))
RUNNABLE = [each.name for each in isa.BUILT if not each.missing(isa.processor_features())]


def cpu_time(bench: Bench, plan: StepPlan, repeats: int) -> float:
    """Seconds of CPU of the step, median."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats):
            start = time.thread_time()
            bench.runner.execute(plan)
            times.append(time.thread_time() - start)
    return median(times)


def rates(benches: Sequence[Bench], steps: Sequence[Step], rounds: int) -> list[list[list[float]]]:
    """Tokens a second, [step][bench][round]: a round goes through all benches, since a shared machine drifts."""
    found: list[list[list[float]]] = []
    for step in steps:
        tokens, repeats = step.batch * step.count, 2 if step.count > 1 else 5
        plans = [bench.plan(step.batch, step.start, step.count) for bench in benches]
        found.append([[] for _ in benches])
        for i in range(rounds + 1):  # the first one warms up
            for bench, plan, of_bench in zip(benches, plans, found[-1], strict=True):
                rate = tokens / cpu_time(bench, plan, repeats)
                if i > 0:
                    of_bench.append(rate)
    return found


def row(name: str, of_step: Sequence[Sequence[float]]) -> str:
    """Median tokens a second of each bench, and median of its ratios to the first one, round by round."""
    cells = []
    for of_bench in of_step:
        ratio = median(ours / first for ours, first in zip(of_bench, of_step[0], strict=True))
        cells.append(f"{median(of_bench):,.0f} ({ratio:.2f})")
    return f"| {name} | {' | '.join(cells)} |"


def measure(
    model: Annotated[str, typer.Option(help=f"a model folder, or a shape: {', '.join(SHAPES)}")] = "125m",
    isas: Annotated[str, typer.Option(help="instruction sets; the first is compared with")] = " ".join(RUNNABLE),
    dtypes: Annotated[str, typer.Option(help="of weights and computation: fp32, bf16")] = "fp32 bf16",
    rounds: int = 5,
) -> None:
    """Prints the table in Markdown."""
    torch.set_num_threads(1)
    folder = checkpoint(model) if model in SHAPES else Path(model)
    kinds = [(name, dtype) for dtype in names(dtypes, "dtypes", DTYPES) for name in names(isas, "isas", RUNNABLE)]
    room = max(step.num_kv_tokens for step in STEPS)
    benches = [Bench(folder, DTYPES[dtype], f"cpu:{name}", room) for name, dtype in kinds]
    print(f"{model} on {machine()}; tok/s of CPU time (ratio to the first)\n")
    print(f"| | {' | '.join(f'{name} {dtype}' for name, dtype in kinds)} |")
    print(f"| --- |{' ---: |' * len(kinds)}")
    for step, of_step in zip(STEPS, rates(benches, STEPS, rounds), strict=True):
        print(row(step.name, of_step), flush=True)


if __name__ == "__main__":
    run(measure)
