"""`python -m loadtest.bench metrics`: what counting costs a request in the router, and a decode step in the engine.

Router: its processor time a request under the same open-loop load, counting and with recording switched off, in turns
that alternate who goes first. Engine: a step's bookkeeping for the metrics, timed apart, over the median decode step of
the demo model, which is the smallest that is served and so the one where the share is largest.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from loadtest.bench.metrics.silent import SilentSteps
from loadtest.bench.router.rig import PROMPT_TOKENS, ROUTER, Rig
from loadtest.command_line import Out
from loadtest.figures import Result, machine, table, write
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.engine.step_counters import StepCounters
from shared.errors import Internal
from shared.model.decoder import Decoder

SILENT = "loadtest.bench.metrics.silent_router"
DEMO = Path("models/demo")
BLOCK_SIZE = 16
GOAL = 0.01
NUM_RECORDINGS = 2000


async def router_cpu_ms(module: str, rate: float, duration_s: float, max_tokens: int) -> float:
    """Processor time a request."""
    with tempfile.TemporaryDirectory() as scratch:
        async with Rig(8, 20_000.0, Path(scratch), router=module) as rig:
            await rig.load(1, rate=rate, duration=2, max_tokens=max_tokens, prefix="warm")
            measured = await rig.load(1, rate=rate, duration=duration_s, max_tokens=max_tokens)
    if measured.num_failed:
        raise Internal(f"{measured.num_failed} requests failed, such as: {measured.failure}")
    return measured.cpu_ms_per_request


async def router(pairs: int, rate: float, duration_s: float, max_tokens: int) -> list[Result]:
    """Pairs of loads; the median of their ratios."""
    counting, ratios = [], []
    for pair in range(pairs):
        order = (ROUTER, SILENT) if pair % 2 == 0 else (SILENT, ROUTER)
        found = {module: await router_cpu_ms(module, rate, duration_s, max_tokens) for module in order}
        counting.append(found[ROUTER])
        ratios.append(found[ROUTER] / found[SILENT])
        print(f"pair {pair + 1}: {found[ROUTER]:.3f} ms a request, without recording {found[SILENT]:.3f}", flush=True)
    name = f"router, {rate:g} req/s of {max_tokens} tokens"
    return [
        Result(f"{name}: processor time a request", median(counting), "ms"),
        Result(f"{name}: share of counting", median(ratios) - 1, "of it", limit=GOAL),
    ]


def step_ms(batch: int, num_cached: int, repeats: int) -> float:
    """Median decode step of the demo model."""
    decoder = Decoder.load(DEMO, torch.bfloat16, "cpu")
    blocks = -(-(num_cached + 1) // BLOCK_SIZE)
    layout = decoder.config.block_layout(BLOCK_SIZE, "bfloat16")
    runner = Runner(decoder, layout, batch * blocks, RunnerConfig(batch))
    runner.kv_blocks.fill_(0.01)
    plan = decode_plan(batch, num_cached, blocks)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        runner.execute(plan)
        times.append(time.perf_counter() - begun)
    return 1e3 * median(times[len(times) // 4 :])


def decode_plan(batch: int, num_cached: int, blocks: int) -> StepPlan:
    """A token for each of `batch` sequences."""
    sample = SampleSpec(SamplingParams(temperature=0.0, seed=1, max_tokens=8), num_cached + 1)
    return StepPlan(
        tuple(
            PlannedSequence(
                str(i), (7,), num_cached, tuple(range(i * blocks, (i + 1) * blocks)), num_cached // 2, sample
            )
            for i in range(batch)
        )
    )


def recording_ms(batch: int) -> float:
    """What a step of this size costs to count."""
    plan, counting, silent = decode_plan(batch, 64, 5), StepCounters(), SilentSteps()
    begun = time.perf_counter()
    for _ in range(NUM_RECORDINGS):
        counting.add(plan.num_tokens, batch, 0.01, plan.num_prefill_tokens)
    between = time.perf_counter()
    for _ in range(NUM_RECORDINGS):
        silent.add(plan.num_tokens, batch, 0.01)
    end = time.perf_counter()
    return 1e3 * ((between - begun) - (end - between)) / NUM_RECORDINGS


def engine(batch: int, repeats: int) -> list[Result]:
    """The share of a decode step."""
    with torch.inference_mode():
        step = step_ms(batch, 64, repeats)
    recording = median(recording_ms(batch) for _ in range(9))
    name = f"decode step of {batch} sequences, demo model"
    return [
        Result(name, step, "ms"),
        Result(f"{name}: counting", recording, "ms"),
        Result(f"{name}: share of counting", recording / step, "of it", limit=GOAL),
    ]


def main(
    out: Out = None,
    pairs: Annotated[int, typer.Option(help="of loads on the router")] = 7,
    rate: Annotated[float, typer.Option(help="requests per second")] = 100.0,
    duration: Annotated[float, typer.Option(help="seconds a load")] = 10.0,
    max_tokens: Annotated[int, typer.Option(help="of each answer")] = 16,
    repeats: Annotated[int, typer.Option(help="decode steps")] = 200,
) -> None:
    """Measure what metrics cost a request and a decode step."""
    print(f"{machine()}; prompts of {PROMPT_TOKENS} tokens")
    results = [result for batch in (1, 8, 64) for result in engine(batch, repeats)]
    results += asyncio.run(router(pairs, rate, duration, max_tokens))
    print(table(results))
    if out is not None:
        write(out, results)
