"""`python -m loadtest.bench determinism`: answers that differ by their batch mates alone or after a retry, with and
without deterministic mode, and what the mode costs.

The answers are an engine's, in this process: a prompt alone, the same among 12, and the same continued from a random
place of its answer, as after a decode worker's death: prompt and answer so far are computed again, as a prompt. The
cost is CPU time of steps. All runs on one thread, since other processes may share the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from loadtest.bench.determinism.answers import (
    BATCH,
    Engine,
    make_prompts,
    share_of_other_bits,
    share_of_other_tokens,
)
from loadtest.bench.engine.cpu import DTYPES, Bench, Step
from loadtest.bench.engine.isa import cpu_time
from loadtest.bench.shapes import SHAPES, checkpoint
from loadtest.command_line import Out, choice, decimals
from loadtest.figures import Result, machine, table, write
from shared.kernels.registry import AUTO

STEPS = (Step(1, 0, 512), Step(1, 0, 2048), Step(1, 256, 1), Step(8, 256, 1), Step(32, 256, 1))
MODES = {False: "plain", True: "deterministic"}


@dataclass(frozen=True)
class Asked:
    """What the answers are answers to."""

    number: int  # of prompts
    num_tokens: int  # of each answer
    temperatures: tuple[float, ...]


def differing(folder: Path, dtype: torch.dtype, kernels: str, asked: Asked, *, deterministic: bool) -> list[Result]:
    """Shares of answers that are not as they were alone, in percent."""
    engine = Engine(folder, dtype, kernels, deterministic=deterministic)
    found = []
    for temperature in asked.temperatures:
        prompts = make_prompts(asked.number, engine.decoder.config.vocab_size, asked.num_tokens, temperature)
        alone = engine.alone(prompts)
        how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        for circumstance, answers in (
            (f"among {BATCH}", engine.together(prompts)),
            ("after a retry", engine.resumed(prompts, alone)),
        ):
            name = f"{MODES[deterministic]}, {how}, {circumstance}"
            found += [
                Result(f"{name}: other tokens", 100 * share_of_other_tokens(answers, alone), "% of answers"),
                Result(f"{name}: other bits", 100 * share_of_other_bits(answers, alone), "% of answers"),
            ]
    return found


def costs(folder: Path, dtype: torch.dtype, kernels: str, steps: Sequence[Step], rounds: int) -> list[Result]:
    """CPU time of each step with the mode over that without, the median of pairs."""
    room = max(step.num_kv_tokens for step in steps)
    plain, mode = (Bench(folder, dtype, kernels, room, deterministic=on) for on in (False, True))
    found = []
    for step in steps:
        plans = [bench.plan(step.batch, step.start, step.count) for bench in (plain, mode)]
        times = []
        for i in range(rounds + 1):  # the first one warms up
            pair = [
                cpu_time(bench, plan, 1 if step.count > 1 else 5)
                for bench, plan in zip((plain, mode), plans, strict=True)
            ]
            if i:
                times.append(pair)
        ratio = median(with_it / without for without, with_it in times)
        found.append(
            Result(
                f"{step.name}, deterministic", 1e3 * median(pair[1] for pair in times), "ms of CPU",
                peer="plain", ratio=1 / ratio,
            )
        )  # fmt: skip
    return found


def main(
    model: Annotated[Path, typer.Option(help="model folder whose answers are compared")] = Path("models/demo"),
    shape: Annotated[str, typer.Option(help=f"random-weight shape of the costs: {', '.join(SHAPES)}")] = "125m",
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES))] = "bf16",
    kernels: Annotated[str, typer.Option(help="backend of the ops: auto, cpu, cpu:avx2")] = AUTO,
    prompts: Annotated[int, typer.Option(min=0, help="prompts, each in every circumstance; 0 = none")] = 200,
    tokens: Annotated[int, typer.Option(min=2, help="of each answer")] = 64,
    temperatures: Annotated[str, typer.Option(help="0 = greedy")] = "0 0.8",
    rounds: Annotated[int, typer.Option(min=0, help="pairs of each step; 0 = no costs")] = 7,
    out: Out = None,
) -> None:
    """Count answers that depend on their batch or on a retry, without and with deterministic mode; time the mode."""
    torch_dtype = DTYPES[choice(dtype, "dtype", DTYPES)]
    folder = checkpoint(choice(shape, "shape", SHAPES)) if rounds else Path()
    asked = Asked(prompts, tokens, tuple(decimals(temperatures, "temperatures")))
    torch.set_num_threads(1)
    results: list[Result] = []
    for deterministic in MODES if prompts else ():
        results += differing(model, torch_dtype, kernels, asked, deterministic=deterministic)
    if rounds:
        results += costs(folder, torch_dtype, kernels, STEPS, rounds)
    print(f"{model} in {dtype}, {prompts} prompts, {tokens} tokens each; {shape}; on {machine()}\n")
    print(table(results))
    if out is not None:
        write(out, results)
