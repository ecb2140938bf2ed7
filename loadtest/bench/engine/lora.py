"""`python -m loadtest.bench lora`: steps with adapters beside the same steps of the base model alone, in turns.

Both run in each round, in an order that turns, so that a machine whose speed drifts drifts for both; a case's figure is
the median over the rounds of base time / time with adapters. One case has an adapter in every eighth row: what that
leaves to the base's rows. Another decodes while adapters are read beside it, in a thread as a worker's.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch

from loadtest.bench.engine.cpu import DTYPES, Bench
from loadtest.bench.engine.cuda import Step
from loadtest.rig.command_line import Option, Out, choice
from loadtest.rig.models import SHAPES, model_folder
from loadtest.rig.results import Report, Result, machine
from shared.engine.plan import StepPlan
from shared.garbage import uncollected
from shared.kernels.cpu.beside_steps import work_beside_steps
from shared.model.adapters.random_adapter import write_random_adapter

NUM_ADAPTERS = 8


@dataclass(frozen=True)
class Case:
    """A step, and the slots of its sequences' adapters in turns; 0: the base model."""

    name: str
    step: Step
    slots: tuple[int, ...]
    goal: float
    """The least that base time / time with adapters should be."""

    def plan(self, base: StepPlan) -> StepPlan:
        """`base` with the adapters."""
        return StepPlan(
            tuple(
                item._replace(adapter=self.slots[index % len(self.slots)]) for index, item in enumerate(base.sequences)
            )
        )


def cases(context: int) -> list[Case]:
    """Every case of this benchmark, for sequences of `context` tokens."""
    every = tuple(range(1, NUM_ADAPTERS + 1))
    found = [Case(f"decode {batch}, one adapter", Step(batch, context, 1), (1,), 0.95) for batch in (1, 8, 32)]
    return [
        *found,
        Case(f"decode 32, {NUM_ADAPTERS} adapters", Step(32, context, 1), every, 0.85),
        Case("decode 32, an adapter in every eighth row", Step(32, context, 1), (1, *(0,) * 7), 0.97),
        Case("prompt of 512, one adapter", Step(1, 0, 512), (1,), 0.95),
    ]


def measure(bench: Bench, case: Case, rounds: int) -> list[Result]:
    """Milliseconds of both, medians, and the median of their quotients."""
    base = case.step.plan(bench.decoder.config.vocab_size)
    plans = (base, case.plan(base))
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            begun = time.perf_counter()
            bench.runner.execute(plans[which])
            taken[which].append(time.perf_counter() - begun)
    alone, beside = (seconds[1:] for seconds in taken)  # the first round warms up
    ratio = median(a / b for a, b in zip(alone, beside, strict=True))
    return [
        Result(f"{case.name}: base", 1e3 * median(alone), "ms"),
        Result(f"{case.name}: with adapters", 1e3 * median(beside), "ms"),
        Result(f"{case.name}: base / with adapters", ratio, "x", case.goal, ratio / case.goal),
    ]


def load(bench: Bench, folder: Path, rank: int, dtype: torch.dtype) -> tuple[float, int]:
    """Fills the slots; (seconds from disk to a slot of the last one, its bytes)."""
    seconds, num_bytes = 0.0, 0
    for slot in range(1, NUM_ADAPTERS + 1):
        path = write_random_adapter(folder / str(slot), bench.decoder.config, rank, seed=slot, dtype=dtype)
        begun = time.perf_counter()
        packed = bench.decoder.pack_adapter(bench.decoder.read_adapter(path))
        bench.runner.place_adapter(slot, packed)
        seconds, num_bytes = time.perf_counter() - begun, packed.nbytes
    return seconds, num_bytes


def load_beside(bench: Bench, step: Step, folder: Path, rounds: int) -> list[Result]:
    """Steps of the base while a thread reads and lays out one adapter, and as many alone, in turns. The longest step of
    all may be the machine's doing: how long those alone are says what it does by itself, and the processor time of the
    thread how much of a step can be the load's."""
    plan = step.plan(bench.decoder.config.vocab_size)

    def take() -> float:
        begun = time.perf_counter()
        bench.runner.execute(plan)
        return time.perf_counter() - begun

    def read() -> float:
        begun = time.perf_counter()
        bench.decoder.pack_adapter(bench.decoder.read_adapter(folder))
        return time.perf_counter() - begun

    alone: list[list[float]] = []
    beside: list[list[float]] = []
    loads, of_load = [], []  # seconds of each load, and of loads in each step beside them
    with ThreadPoolExecutor(1, initializer=work_beside_steps) as thread:
        thread.submit(read).result()
        clock = time.pthread_getcpuclockid(thread.submit(threading.get_ident).result())
        for _ in range(rounds):
            loading, taken = thread.submit(read), []
            while not loading.done():
                before = time.clock_gettime(clock)
                taken.append(take())
                of_load.append(time.clock_gettime(clock) - before)
            beside.append(taken)
            loads.append(loading.result())
            alone.append([take() for _ in taken])
    p99 = float(np.quantile(np.concatenate(alone), 0.99))
    longest, longest_alone = (max(map(max, steps)) / p99 for steps in (beside, alone))
    of_each = median(max(ours) / max(theirs) for ours, theirs in zip(beside, alone, strict=True))
    name = "a load beside decode 8"
    return [
        Result(f"{name}: step alone, median", 1e3 * median(np.concatenate(alone)), "ms"),
        Result(f"{name}: step alone, p99", 1e3 * p99, "ms"),
        Result(f"{name}: step, median", 1e3 * median(np.concatenate(beside)), "ms"),
        Result(f"{name}: longest step of a load / of as many alone, median", of_each, "x", 1.1, 1.1 / of_each),
        Result(f"{name}: the load's processor time in a step, median", 1e3 * median(of_load), "ms"),
        Result(f"{name}: the same, most", 1e3 * max(of_load), "ms"),
        Result(f"{name}: longest step of all / p99 alone", longest, "x", 1.1, 1.1 / longest),
        Result(f"{name}: longest step of all alone / p99 alone", longest_alone, "x"),
        Result(f"{name}: disk to kernels, median", 1e3 * median(loads), "ms", 500, 0.5 / median(loads)),
    ]


def main(
    model: Annotated[str, Option(help=f"a model folder, or a shape: {', '.join(SHAPES)}")] = "1b",
    dtype: Annotated[str, Option(help=" or ".join(DTYPES))] = "bf16",
    rank: Annotated[int, Option()] = 16,
    context: Annotated[int, Option(help="cached tokens of each sequence that decodes")] = 256,
    rounds: Annotated[int, Option()] = 15,
    out: Out = None,
) -> None:
    """Measure steps with adapters of all seven projections beside the base model's steps on this processor."""
    torch_dtype = DTYPES[choice(dtype, "dtype", DTYPES)]
    chosen = cases(context)
    folder = model_folder(model)
    with uncollected():  # as a worker starts
        bench = Bench(folder, torch_dtype, "auto", max(case.step.num_kv_tokens for case in chosen))
    report = Report(out)
    with tempfile.TemporaryDirectory() as adapters, torch.inference_mode():
        seconds, num_bytes = load(bench, Path(adapters), rank, torch_dtype)
        report.add(
            [
                Result("adapter, from disk to its slot", 1e3 * seconds, "ms"),
                Result("adapter, in its slot", num_bytes / 1e6, "MB"),
            ]
        )
        report.add([result for case in chosen for result in measure(bench, case, rounds)])
        report.add(load_beside(bench, Step(8, context, 1), Path(adapters) / "1", rounds))
    print(f"{model} in {dtype}, rank {rank}, kernels {bench.decoder.kernels.name}, on {machine()}\n")
    report.print()
