"""`python -m loadtest.bench long-prompt`: the effect of arriving long prompts on the inter-token latency of others."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Annotated

from loadtest.baseline.systems import (
    Candidate,
    Hardware,
    System,
    adaptive,
    collocated,
    disaggregated,
    make_cluster,
)
from loadtest.bench.long_prompt.load import Load, Shape
from loadtest.bench.long_prompt.noisy_neighbour import noisy_neighbour, pin_all_but
from loadtest.bench.long_prompt.windows import Pair, median_of
from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.rig.command_line import Option, Out, choice, names
from loadtest.rig.markdown import bold, table
from loadtest.rig.measure import turns
from loadtest.rig.models import SERVED, write_model
from loadtest.rig.results import Report, Result
from loadtest.workloads.tokens import TokenSource

GOAL_RATIO = 1.1
"""Goal of all but the collocated systems: a long prompt changes the p99 of the running answers by less than 10 %."""
CHUNKS_PER_PROMPT = 8
SYSTEMS = (disaggregated(1, 2), adaptive(2), collocated(2), collocated(1))
_NUM_KV_BLOCKS = 8192
"""Of all workers of a system together."""
_WORKERS = ("prefill", "decode", "worker")
"""What the names of their processes begin with."""
_NAMES = [system.name for system in SYSTEMS]


def main(
    chunk: Annotated[int, Option(help=f"chunk budget, tokens; a long prompt has {CHUNKS_PER_PROMPT} of them")] = 128,
    answers: Annotated[int, Option(help="answers that stream all the time")] = 8,
    window: Annotated[float, Option(help="seconds without and with long prompts, in two halves each")] = 6.0,
    pairs: Annotated[int, Option(help="measurements of each system, in turns")] = 5,
    shape: Annotated[str, Option(help=f"random weights in this shape: {', '.join(SERVED)}")] = "xs",
    model: Annotated[Path | None, Option(help="a model's folder instead")] = None,
    tokenizer: Annotated[Path, Option(help="model whose tokenizer a shape takes")] = Path("models/demo"),
    systems: Annotated[str, Option(help="which to measure")] = " ".join(_NAMES),
    seed: Annotated[int, Option()] = 1,
    out: Out = None,
) -> None:
    """Measure inter-token latency of running answers, with and without arriving long prompts."""
    choice(shape, "shape", SERVED)
    wanted = names(systems, "systems", _NAMES)
    measured_systems = [system for system in SYSTEMS if system.name in wanted]
    load = Shape(answers, num_long_tokens=CHUNKS_PER_PROMPT * chunk, window_s=window)
    with tempfile.TemporaryDirectory(prefix="tandem-long-prompt-") as scratch:
        if model is None:
            model = write_model(Path(scratch) / f"random-{shape}", SERVED[shape], tokenizer)
        measured = asyncio.run(measure(measured_systems, model, chunk, load, pairs, seed, Path(scratch)))
    print(
        f"{answers} answers, prompts of {load.num_long_tokens} tokens one after the other, "
        f"chunks of {chunk}, {pairs} pairs of {window:g} s\n\n{system_table(measured_systems, measured)}"
    )
    Report(out).add(results(measured_systems, measured))


async def measure(
    systems: Sequence[System], model: Path, chunk_len: int, shape: Shape, num_pairs: int, seed: int, out: Path
) -> dict[str, list[Pair]]:
    """Pairs by system name. All systems run at once and are measured in turns, while the others idle."""
    cores = sorted(os.sched_getaffinity(0))
    measured: dict[str, list[Pair]] = {system.name: [] for system in systems}
    async with AsyncExitStack() as stack:
        loads, workers = {}, []
        for system in systems:
            hardware = Hardware(model, "cpu", _NUM_KV_BLOCKS // system.num_workers)
            cluster = await stack.enter_async_context(make_cluster(Candidate(system, chunk_len), hardware, out))
            workers += [child.pid for name, child in cluster.children.items() if name.startswith(_WORKERS)]
            client = make_client(parse_target(f"grpc://{cluster.grpc}"))
            await client.start()
            stack.push_async_callback(client.close)
            loads[system.name] = Load(client, shape, TokenSource(seed))
        neighbour = None
        if any(system.mode == "disaggregated" for system in systems):
            # Runs on the core of that system's prefill worker.
            neighbour = await stack.enter_async_context(
                noisy_neighbour(model, chunk_len, shape.num_long_tokens, cores[0], out)
            )
        pin_all_but(workers, cores[:1])
        try:
            for load in loads.values():  # warm-up: one-time allocations and compilations
                await load.pair(busy_first=True)
            for turn, system in turns(systems, num_pairs):
                beside = neighbour if system.mode == "disaggregated" else None
                pair = await loads[system.name].pair(busy_first=turn % 2 == 1, neighbour=beside)
                measured[system.name].append(pair)
        finally:
            pin_all_but(workers, cores)
    return measured


def system_table(systems: Sequence[System], measured: dict[str, list[Pair]]) -> str:
    """A Markdown table, one row for each system."""
    columns = (
        "system", "ITL p99 without", "with", "ratio (each pair's)", "beside a neighbour", "over that", "p50 ratio",
        "long prompts", "their TTFT",
    )  # fmt: skip
    return table(columns, [_cells(system, measured[system.name]) for system in systems])


def _cells(system: System, pairs: Sequence[Pair]) -> list[str]:
    def ms(figure: str, digits: int = 1) -> str:
        value = median_of(pairs, attrgetter(figure))
        return "" if value is None else f"{value:.{digits}f} ms"

    return [
        system.name,
        ms("quiet_p99_ms"),
        ms("busy_p99_ms"),
        _with_each(pairs, "p99_ratio"),
        ms("neighbour_p99_ms"),
        _with_each(pairs, "p99_over_neighbour"),
        f"{median_of(pairs, attrgetter('p50_ratio')):.2f}",
        f"{sum(pair.num_prompts for pair in pairs)}",
        ms("prompt_ttft_ms", 0),
    ]


def _with_each(pairs: Sequence[Pair], figure: str) -> str:
    known = [value for pair in pairs if (value := getattr(pair, figure)) is not None]
    each = ", ".join(f"{value:.2f}" for value in known)
    return f"{bold(f'{median(known):.2f}')} ({each})" if known else ""


_FIGURES = (
    ("ITL p99 without long prompts", "quiet_p99_ms", "ms"),
    ("ITL p99 with long prompts", "busy_p99_ms", "ms"),
    ("ITL p99 with over without", "p99_ratio", ""),
    ("ITL p99 with over as much work beside it", "p99_over_neighbour", ""),
    ("ITL p50 with over without", "p50_ratio", ""),
    ("TTFT p50 of the long prompts", "prompt_ttft_ms", "ms"),
)
"""Name, field of a pair, unit."""


def results(systems: Sequence[System], measured: dict[str, list[Pair]]) -> list[Result]:
    """The figures for scripts; the best collocated system is the peer of the others."""
    ratios = {system.name: median_of(measured[system.name], attrgetter("p99_ratio")) or 0.0 for system in systems}
    peers = [system for system in systems if system.mode == "collocated"]
    peer = min(peers, key=lambda system: ratios[system.name], default=None)
    found = []
    for system in systems:
        for title, figure, unit in _FIGURES:
            value = median_of(measured[system.name], attrgetter(figure))
            if value is None:
                continue
            result = Result(f"{system.name}: {title}", value, unit)
            if figure == "p99_ratio" and system.mode != "collocated":
                result = replace(result, limit=GOAL_RATIO)
                if peer is not None:
                    result = replace(result, peer=peer.name, ratio=ratios[peer.name] / value)
            found.append(result)
    return found
