"""`python -m loadtest.bench prefix`: the prefill that a fleet saves, and the benefit of a prefix from the store.

Hits: a trace of conversations runs through real workers, 1, 2 and 4 in each pool, in the trace's order, as fast as they
serve it; also with a router without an index, and with a store. The pools have the same number of blocks in total for
any number of workers. Times: TTFT with and without a store, over links of several speeds.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import loadtest
from loadtest.bench.prefix.clusters import Setup, write_tiny_model
from loadtest.bench.prefix.hits import GOAL, HitRun, hit_table, measure_hits
from loadtest.bench.prefix.prompts import read_prompts
from loadtest.bench.prefix.ttft import TtftRun, measure_ttft, ttft_setups, ttft_table
from loadtest.rig.command_line import Option, Out, integers, names
from loadtest.rig.results import Report, machine
from loadtest.workloads.tokens import TokenSource
from shared.errors import Internal, TandemError

_SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
PARTS = ("index", "no-index", "store", "ttft")
_VOCAB_SIZE = 3000
"""Vocabulary size that all models here support."""


@dataclass(frozen=True, slots=True)
class Fleets:
    """The clusters that replay the trace."""

    workers: Sequence[int] = (1, 2, 4)
    """Sizes of each pool, measured one after the other."""
    blocks: int = 8192
    """Blocks of all prefill pools together."""
    store_blocks: int = 8192
    parts: Collection[str] = PARTS


@dataclass(frozen=True, slots=True)
class Replay:
    """Parameters of the replay."""

    trace: Path = _SLICE
    num_requests: int = 1500
    scale_output: int = 128
    in_flight: int = 8
    limit_s: float = 90.0


def hit_setups(fleets: Fleets, model: Path) -> Iterator[Setup]:
    """The clusters that replay the trace."""
    for num_workers in fleets.workers:
        pool_blocks = fleets.blocks // num_workers
        title = f"{num_workers} a pool"
        if "index" in fleets.parts:
            yield Setup(f"{title}, index", model, num_workers, pool_blocks)
        if "no-index" in fleets.parts and num_workers > 1:
            yield Setup(f"{title}, no index", model, num_workers, pool_blocks, indexed=False)
        if "store" in fleets.parts:
            yield Setup(f"{title}, index and store", model, num_workers, pool_blocks, fleets.store_blocks)


async def run(fleets: Fleets, replay: Replay, ttft_prompts: int, seed: int, report: Report) -> None:
    """Measures the requested parts; prints the tables, and writes the results after each cluster."""
    source = TokenSource(seed, _VOCAB_SIZE)
    hits: list[HitRun] = []
    times: list[TtftRun] = []
    prompts = read_prompts(replay.trace, replay.num_requests, replay.scale_output, source)

    def note(run: HitRun | TtftRun, text: str) -> None:
        print(f"{run.setup.name}: {text}", flush=True)
        report.add(run.results())

    with tempfile.TemporaryDirectory() as folder:
        for setup in hit_setups(fleets, write_tiny_model(Path(folder))):
            hits.append(await measure_hits(setup, prompts, replay.in_flight, replay.limit_s))
            note(hits[-1], f"{hits[-1].num_requests} requests, {hits[-1].ratio:.1%} of the ideal")
    for setup in ttft_setups() if "ttft" in fleets.parts else ():
        times.append(await measure_ttft(setup, ttft_prompts, source))
        note(times[-1], f"TTFT p50 {1e3 * times[-1].ttft_s:.1f} ms")
    if hits:
        print(f"\n{fleets.blocks:,} blocks in all prefill pools, the goal is {GOAL:.0%} of the ideal\n")
        print(hit_table(hits))
    if times:
        print(f"\n{ttft_prompts} prompts each\n\n{ttft_table(times)}")


def main(
    trace: Annotated[Path, Option(help="Mooncake JSON lines; default: the shipped slice")] = _SLICE,
    requests: Annotated[int, Option(help="number of requests, from the trace's start")] = 1500,
    scale_output: Annotated[int, Option(help="divides the trace's answer lengths")] = 128,
    workers: Annotated[str, Option(help="workers in each pool")] = "1 2 4",
    blocks: Annotated[int, Option(help="blocks of 16 tokens, of all prefill pools together")] = 8192,
    store_blocks: Annotated[int, Option(help="blocks in the store's host memory")] = 8192,
    in_flight: Annotated[int, Option(help="concurrent requests")] = 8,
    limit: Annotated[float, Option(help="seconds after which no more prompts are sent to a cluster")] = 90.0,
    parts: Annotated[str, Option(help="what to measure")] = " ".join(PARTS),
    ttft_prompts: Annotated[int, Option(help="prompts with a returning prefix, for each cluster")] = 16,
    seed: Annotated[int, Option(help="seed of the prompts' tokens")] = 0,
    out: Out = None,
) -> None:
    """Compare a fleet's prefix hits with those of one ideal cache, and TTFT with and without a store."""
    fleets = Fleets(integers(workers, "workers"), blocks, store_blocks, names(parts, "parts", PARTS))
    replay = Replay(trace, requests, scale_output, in_flight, limit)
    print(machine())
    try:
        asyncio.run(run(fleets, replay, ttft_prompts, seed, Report(out)))
    except* TandemError as errors:
        raise Internal("; ".join(str(error) for error in errors.exceptions)) from None
