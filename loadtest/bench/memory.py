"""`python -m loadtest.bench memory`: resident memory of a cluster's processes under prompts of ever other lengths.

A library that keeps something for every shape that it meets grows for as long as new lengths come. Once every page of
the KV pool has been written, a worker's memory should stand still.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import psutil
import typer

from loadtest.arrivals import Gamma
from loadtest.clients.base import Call, Client, RequestFailed
from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.command_line import Out, names
from loadtest.figures import Result, machine, write
from loadtest.markdown import table
from loadtest.records import Reply
from loadtest.workloads.tokens import Span, TokenSource
from services.local.cluster import LocalCluster
from services.local.model_pools import Dtype
from services.local.spec import ClusterSpec
from shared.errors import Internal
from shared.kernels.cpu import isa

GOAL_GROWTH = 0.05
"""Of a worker's memory from the first full pass over its pool on."""
SHORTEST, LONGEST = 50, 600
"""Tokens of a prompt, uniform."""
MAX_TOKENS = 16
SAMPLE_S = 1.0
BLOCK_SIZE = 16
_WINDOW = 10
"""Samples whose median is a figure: one step's own buffers come and go."""
_FEATURES = isa.processor_features()
_SETS = ["torch", *(each.name for each in reversed(isa.BUILT) if not each.missing(_FEATURES))]
_EMULATED = [each.name for each in isa.emulated(_FEATURES)]


@dataclass(slots=True)
class Growth:
    """One process's resident memory from the first full pass over the pool on, bytes, one sample a second."""

    start_bytes: int
    """At the start of the load."""
    samples: list[int] = field(default_factory=list)

    @property
    def passed_bytes(self) -> float:
        """Right after the first pass."""
        return median(self.samples[:_WINDOW])

    @property
    def end_bytes(self) -> float:
        """At the end."""
        return median(self.samples[-_WINDOW:])

    @property
    def most_bytes(self) -> int:
        """The largest sample."""
        return max(self.samples)

    @property
    def share(self) -> float:
        """Growth of the median over its first value."""
        return self.end_bytes / self.passed_bytes - 1


@dataclass(slots=True)
class Run:
    """One cluster's measurement."""

    num_requests: int = 0
    pass_s: float = 0.0
    """When the pool had been passed, seconds from the start."""
    growth: dict[str, Growth] = field(default_factory=dict)
    """By process."""


def main(
    duration: Annotated[float, typer.Option(help="seconds of load for each instruction set")] = 300.0,
    rate: Annotated[float, typer.Option(help="requests a second, Poisson arrivals")] = 10.0,
    blocks: Annotated[int, typer.Option(help="blocks of each worker's pool; a pass must fit into the duration")] = 2048,
    sets: Annotated[str, typer.Option(help="TANDEM_CPU_ISA; emulated ones if named")] = " ".join(_SETS),
    model: Annotated[Path, typer.Option(help="model folder")] = Path("models/demo"),
    dtype: Annotated[Dtype, typer.Option(help="of the workers")] = "auto",
    out: Out = None,
) -> None:
    """Measure whether the workers' memory stands still under prompts of all lengths."""
    runs: dict[str, Run] = {}
    try:
        for name in names(sets, "sets", [*_SETS, *_EMULATED]):
            with tempfile.TemporaryDirectory(prefix="tandem-memory-") as folder:
                any_port = "127.0.0.1:0"
                spec = ClusterSpec(
                    model, dtype=dtype, num_kv_blocks=blocks, http=any_port, grpc=any_port, state_dir=Path(folder)
                )
                os.environ["TANDEM_CPU_ISA"] = name
                runs[name] = asyncio.run(measure(spec, duration, rate))
            print(f"{name}: {runs[name].num_requests} answers, the pool was passed after {runs[name].pass_s:.0f} s")
    finally:  # where a set cannot serve the rate, the others' minutes are not lost
        if runs:
            print(f"\n{machine()}, pool of {blocks} blocks\n\n{growth_table(runs)}")
        if runs and out is not None:
            write(out, [result for name, run in runs.items() for result in results(name, run)])


async def measure(spec: ClusterSpec, duration_s: float, rate: float) -> Run:
    """One cluster under load. Raises Internal where a request fails or the pool is never passed."""
    run = Run()
    async with LocalCluster(spec) as cluster:
        client = make_client(parse_target(f"grpc://{cluster.grpc}"))
        await client.start()
        processes = {name: psutil.Process(child.pid) for name, child in cluster.children.items()}
        run.growth = {name: Growth(each.memory_info().rss) for name, each in processes.items()}
        load = _Load(client, spec.num_kv_blocks * BLOCK_SIZE)
        sampling = asyncio.create_task(_sample(run, processes, load))
        try:
            await load.send(duration_s, rate)
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
            await client.close()
    run.num_requests = load.num_answers
    if any(len(each.samples) < 2 * _WINDOW for each in run.growth.values()):
        raise Internal(f"too little time was left after {load.num_tokens} tokens: a longer duration or a smaller pool")
    return run


async def _sample(run: Run, processes: dict[str, psutil.Process], load: _Load) -> None:
    start = time.perf_counter()
    while True:
        await asyncio.sleep(SAMPLE_S)
        if load.has_passed:
            run.pass_s = run.pass_s or time.perf_counter() - start
            for name, process in processes.items():
                run.growth[name].samples.append(process.memory_info().rss)


class _Load:
    """Prompts of random tokens and lengths, so that none has a prefix and each takes blocks of its own."""

    def __init__(self, client: Client, pool_tokens: int) -> None:
        self.num_answers = 0
        self.num_tokens = 0
        """Of the prompts whose answers are complete: both workers have held their blocks."""
        self._client = client
        self._pool_tokens = pool_tokens
        self._random = np.random.default_rng(1)
        self._tokens = TokenSource(1)

    @property
    def has_passed(self) -> bool:
        """Whether every block of a pool has been used: the least recently used one goes first."""
        return self.num_tokens >= self._pool_tokens

    async def send(self, duration_s: float, rate: float) -> None:
        """Open loop; waits for the last answer. Raises Internal for the first request that fails."""
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for number, at_s in enumerate(Gamma(rate).offsets(self._random)):
                    if at_s >= duration_s:
                        break
                    await asyncio.sleep(start + at_s - time.perf_counter())
                    group.create_task(self._ask(number))
        except* RequestFailed as failures:
            raise Internal(f"a request failed: {failures.exceptions[0]}") from None

    async def _ask(self, number: int) -> None:
        length = int(self._random.integers(SHORTEST, LONGEST + 1))
        prompt = self._tokens.span(Span(f"memory-{number}", length))
        await self._client.generate(self._client.encode(Call(f"memory-{number}", prompt, MAX_TOKENS)), Reply())
        self.num_answers += 1
        self.num_tokens += length


def growth_table(runs: dict[str, Run]) -> str:
    """A Markdown table, one row for each instruction set and process."""
    columns = ("instruction set", "process", "at the start", "pool passed", "at the end", "most", "growth")
    rows: list[Sequence[str]] = [
        (
            set_name,
            process,
            *(f"{value / 2**20:.1f} MiB" for value in (of.start_bytes, of.passed_bytes, of.end_bytes, of.most_bytes)),
            f"{of.share:+.1%}",
        )
        for set_name, run in runs.items()
        for process, of in run.growth.items()
    ]
    return table(columns, rows)


def results(set_name: str, run: Run) -> list[Result]:
    """The format of every benchmark's results."""
    return [
        Result(f"{set_name}: {process}, {what}", value, unit, limit=limit)
        for process, of in run.growth.items()
        for what, value, unit, limit in (
            ("memory when the pool was passed", of.passed_bytes, "bytes", None),
            ("memory at the end", of.end_bytes, "bytes", None),
            ("growth", of.share, "", GOAL_GROWTH if process.startswith(("prefill", "decode")) else None),
        )
    ]
