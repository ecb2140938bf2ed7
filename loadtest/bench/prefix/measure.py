"""`python -m loadtest.bench prefix`: the prefill that a fleet saves, and the benefit of a prefix from the store.

Hits: a trace of conversations runs through real workers, 1, 2 and 4 in each pool, in the trace's order, as fast as they
serve it; also with a router without an index, and with a store. The pools have the same number of blocks in total for
any number of workers.

Times: TTFT of prompts whose prefix no worker holds any more, but the store may, over links of several speeds. First
each prefix is computed once; the pools are so small that all have evicted it when it returns with a new question. Each
such prompt alternates with a fresh one of the same length, which gives the time of computing it at this moment.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import loadtest
from loadtest.bench.prefix.ideal import Prompt, ideal_hit_tokens, make_prompt, read_prompts
from loadtest.bench.prefix.real_clusters import Client, Outcome, Setup, make_cluster, write_tiny_model
from loadtest.rig.command_line import Option, Out, integers, names
from loadtest.rig.models import DEMO
from loadtest.rig.results import Report, Result, machine
from loadtest.workloads.tokens import Span, TokenSource
from shared.errors import Internal, TandemError
from shared.settings.common import PrefixFetch

_SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
PARTS = ("index", "no-index", "store", "ttft")
GOAL = 0.95
"""Goal: share of the ideal cache's hits."""
_VOCAB_SIZE = 3000
"""Vocabulary size that all models here support."""
PREFIX_TOKENS = 960
QUESTION_TOKENS = 32
POOL_BLOCKS = 256
"""Pool of each worker in the times: room for the last four prompts."""
STORE_BLOCKS = 8192
WARM_UP_PROMPTS = 4
"""Prompts that return first and are not counted: the workers learn the link's speed from them."""
LINKS = {"": 0.0, "1 Gbit/s": 125e6, "100 Mbit/s": 12.5e6}
"""Bytes a second that the store sends; 0 = no limit."""
_WAYS: dict[str, PrefixFetch] = {"compute only": "never", "fetch only": "always", "both": "auto"}


@dataclass(frozen=True, slots=True)
class HitRun:
    """One cluster's results on the trace. Tokens are prompt tokens."""

    setup: Setup
    num_requests: int
    num_prompt_tokens: int
    num_hit_tokens: int
    """Tokens that the prefill worker did not compute: local or fetched."""
    fetched_tokens: dict[str, int]
    """Tokens among these that the prefill workers fetched, by source."""
    num_ideal_tokens: int
    """Hits of one cache with the blocks of all prefill pools and the store."""
    requests_per_s: float

    @property
    def ratio(self) -> float:
        """Hits over the ideal cache's hits; 1 if it has none."""
        return self.num_hit_tokens / self.num_ideal_tokens if self.num_ideal_tokens else 1.0

    @property
    def places(self) -> dict[str, int]:
        """Hits by where they were; local ones were in the prefill worker's own pool."""
        return {"local": max(0, self.num_hit_tokens - sum(self.fetched_tokens.values())), **self.fetched_tokens}

    def results(self) -> list[Result]:
        """The figures for the JSON file."""
        name, percent = self.setup.name, 100 / self.num_prompt_tokens
        rate, ideal = percent * self.num_hit_tokens, percent * self.num_ideal_tokens
        return [
            Result(f"{name}: fleet hit rate", rate, "%", ideal, self.ratio),
            Result(f"{name}: requests", self.num_requests, "requests"),
            Result(f"{name}: prompt tokens", self.num_prompt_tokens, "tokens"),
            *(Result(f"{name}: hits, {place}", value, "tokens") for place, value in self.places.items()),
            Result(f"{name}: speed", self.requests_per_s, "requests/s"),
        ]


@dataclass(frozen=True, slots=True)
class TtftRun:
    """One cluster's times, in seconds."""

    setup: Setup
    returned: Sequence[Outcome]
    """Prompts whose prefix was computed before."""
    fresh: Sequence[Outcome]
    """Prompts of the same length, not seen before."""

    @property
    def ttft_s(self) -> float:
        """Median of the prompts whose prefix came back."""
        return median(outcome.ttft_s for outcome in self.returned)

    @property
    def fresh_ttft_s(self) -> float:
        """Median of the fresh prompts."""
        return median(outcome.ttft_s for outcome in self.fresh)

    @property
    def cached_share(self) -> float:
        """Share of the returned prompts' tokens that was not computed."""
        num_tokens = sum(len(outcome.prompt.token_ids) for outcome in self.returned)
        return sum(outcome.num_cached_tokens for outcome in self.returned) / num_tokens

    def results(self) -> list[Result]:
        """The figures for the JSON file."""
        peer = f"never seen: {1e3 * self.fresh_ttft_s:.1f} ms"
        ratio = self.fresh_ttft_s / self.ttft_s
        return [
            Result(f"TTFT p50, {self.setup.name}", 1e3 * self.ttft_s, "ms", peer=peer, ratio=ratio),
            Result(f"prompt tokens not computed, {self.setup.name}", 100 * self.cached_share, "%"),
        ]


def hit_setups(
    workers: Sequence[int], blocks: int, store_blocks: int, parts: Collection[str], model: Path
) -> Iterator[Setup]:
    """The clusters that replay the trace; `blocks` are those of all prefill pools together."""
    for num_workers in workers:
        pool_blocks = blocks // num_workers
        title = f"{num_workers} a pool"
        if "index" in parts:
            yield Setup(f"{title}, index", model, num_workers, pool_blocks)
        if "no-index" in parts and num_workers > 1:
            yield Setup(f"{title}, no index", model, num_workers, pool_blocks, indexed=False)
        if "store" in parts:
            yield Setup(f"{title}, index and store", model, num_workers, pool_blocks, store_blocks)


def ttft_setups() -> Iterator[Setup]:
    """One prefill and one decode worker, without a store, and with a store over each link."""
    yield Setup("no store", DEMO, 1, POOL_BLOCKS, prefix_fetch="never")
    for link, bytes_per_s in LINKS.items():
        for way, prefix_fetch in _WAYS.items():
            if prefix_fetch == "never" and link:
                continue  # nothing is fetched, so the link does not matter
            name = ", ".join(filter(None, ("store", link, way)))
            yield Setup(
                name, DEMO, 1, POOL_BLOCKS, STORE_BLOCKS, prefix_fetch=prefix_fetch, send_bytes_per_s=bytes_per_s
            )


async def measure_hits(setup: Setup, prompts: Sequence[Prompt], in_flight: int, limit_s: float) -> HitRun:
    """Starts the cluster, replays the trace for at most `limit_s` seconds, stops it. The ideal cache gets exactly the
    prompts that were sent."""
    with tempfile.TemporaryDirectory() as folder:
        async with make_cluster(setup, Path(folder)) as cluster, Client(cluster.grpc) as client:
            began = time.perf_counter()
            outcomes = await client.replay(prompts, in_flight, limit_s)
            seconds = time.perf_counter() - began
            fetched = await client.fetched_tokens()
    sent = [outcome.prompt for outcome in outcomes]
    return HitRun(
        setup,
        len(sent),
        sum(len(prompt.token_ids) for prompt in sent),
        sum(outcome.num_cached_tokens for outcome in outcomes),
        fetched,
        ideal_hit_tokens(sent, setup.num_workers * setup.pool_blocks + setup.store_blocks),
        len(sent) / seconds,
    )


async def measure_ttft(setup: Setup, num_prompts: int, source: TokenSource) -> TtftRun:
    """Starts the cluster, sends one prompt at a time, stops it."""
    num_all = WARM_UP_PROMPTS + num_prompts
    prefixes = [source.span(Span(f"prefix/{i}", PREFIX_TOKENS)) for i in range(num_all)]
    questions = [source.span(Span(f"question/{i}", QUESTION_TOKENS)) for i in range(num_all)]
    fresh = [source.span(Span(f"fresh/{i}", PREFIX_TOKENS + QUESTION_TOKENS)) for i in range(num_all)]
    returned, never_seen = [], []
    with tempfile.TemporaryDirectory() as folder:
        async with make_cluster(setup, Path(folder)) as cluster, Client(cluster.grpc) as client:
            for prefix in prefixes:
                await client.ask(make_prompt(prefix, 1))
            for prefix, question, other in zip(prefixes, questions, fresh, strict=True):
                returned.append(await client.ask(make_prompt(prefix + question, 1)))
                never_seen.append(await client.ask(make_prompt(other, 1)))
    return TtftRun(setup, returned[WARM_UP_PROMPTS:], never_seen[WARM_UP_PROMPTS:])


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
    wanted, sizes = names(parts, "parts", PARTS), integers(workers, "workers")
    source, report = TokenSource(seed, _VOCAB_SIZE), Report(out)
    prompts = read_prompts(trace, requests, scale_output, source)

    async def measure() -> None:
        """Writes the results after each cluster."""
        with tempfile.TemporaryDirectory() as folder:
            for setup in hit_setups(sizes, blocks, store_blocks, wanted, write_tiny_model(Path(folder))):
                hits = await measure_hits(setup, prompts, in_flight, limit)
                print(f"{setup.name}: {hits.num_requests} requests, {hits.ratio:.1%} of the ideal", flush=True)
                report.add(hits.results())
        for setup in ttft_setups() if "ttft" in wanted else ():
            times = await measure_ttft(setup, ttft_prompts, source)
            print(f"{setup.name}: TTFT p50 {1e3 * times.ttft_s:.1f} ms", flush=True)
            report.add(times.results())
        report.print()

    print(f"{machine()}; {blocks:,} blocks in all prefill pools; the goal is {GOAL:.0%} of the ideal cache's hits")
    try:
        asyncio.run(measure())
    except* TandemError as errors:
        raise Internal("; ".join(str(error) for error in errors.exceptions)) from None
