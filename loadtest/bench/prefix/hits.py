"""The fleet's prefix hits over a trace, compared with one ideal cache of the same size."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.prefix.client import Client
from loadtest.bench.prefix.clusters import Setup, make_cluster
from loadtest.bench.prefix.ideal import Losses, Served, find_losses, ideal_hit_tokens
from loadtest.bench.prefix.prompts import BLOCK_SIZE, Prompt
from loadtest.rig.markdown import table
from loadtest.rig.results import Result

GOAL = 0.95
"""Goal: share of the ideal cache's hits."""


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
    num_ideal_with_decode_tokens: int
    """Hits of one cache that also has the blocks of the decode pools."""
    num_endless_tokens: int
    """Hits of an unlimited cache."""
    losses: Losses
    requests_per_s: float

    @property
    def num_local_tokens(self) -> int:
        """Hits in the prefill worker's own pool."""
        return max(0, self.num_hit_tokens - sum(self.fetched_tokens.values()))

    @property
    def hit_rate(self) -> float:
        """Hits over all prompt tokens."""
        return self.num_hit_tokens / self.num_prompt_tokens

    @property
    def ideal_rate(self) -> float:
        """The same for the ideal cache."""
        return self.num_ideal_tokens / self.num_prompt_tokens

    @property
    def ratio(self) -> float:
        """Hits over the ideal cache's hits; 1 if it has none."""
        return self.num_hit_tokens / self.num_ideal_tokens if self.num_ideal_tokens else 1.0

    def results(self) -> list[Result]:
        """The figures for the JSON file."""
        name, tokens = self.setup.name, self.num_prompt_tokens
        places = {"local": self.num_local_tokens, **self.fetched_tokens}
        losses = {"split": self.losses.split, "placement": self.losses.placement, "timing": self.losses.timing}
        return [
            Result(f"{name}: fleet hit rate", 100 * self.hit_rate, "%", 100 * self.ideal_rate, self.ratio),
            Result(f"{name}: ideal with the decode pools", 100 * self.num_ideal_with_decode_tokens / tokens, "%"),
            Result(f"{name}: hit rate of an endless cache", 100 * self.num_endless_tokens / tokens, "%"),
            Result(f"{name}: requests", self.num_requests, "requests"),
            Result(f"{name}: prompt tokens", tokens, "tokens"),
            *(Result(f"{name}: hits, {place}", value, "tokens") for place, value in places.items()),
            *(Result(f"{name}: lost to {cause}", value, "tokens") for cause, value in losses.items()),
            Result(f"{name}: speed", self.requests_per_s, "requests/s"),
        ]


async def measure_hits(setup: Setup, prompts: Sequence[Prompt], in_flight: int, limit_s: float) -> HitRun:
    """Starts the cluster, replays the trace for at most `limit_s` seconds, stops it. The ideal caches get exactly the
    prompts that were sent."""
    with tempfile.TemporaryDirectory() as folder:
        async with make_cluster(setup, Path(folder)) as cluster, Client(cluster.grpc) as client:
            began = time.perf_counter()
            outcomes = await client.replay(prompts, in_flight, limit_s)
            seconds = time.perf_counter() - began
            fetched = await client.fetched_tokens()
    sent = [outcome.prompt for outcome in outcomes]
    num_pool_blocks = setup.num_workers * setup.pool_blocks
    ideal = ideal_hit_tokens(sent, num_pool_blocks + setup.store_blocks, BLOCK_SIZE)
    served = [Served(outcome.prompt, outcome.prefill_worker, outcome.num_cached_tokens) for outcome in outcomes]
    return HitRun(
        setup,
        len(sent),
        sum(len(prompt.token_ids) for prompt in sent),
        sum(outcome.num_cached_tokens for outcome in outcomes),
        fetched,
        ideal,
        ideal_hit_tokens(sent, 2 * num_pool_blocks + setup.store_blocks, BLOCK_SIZE),
        ideal_hit_tokens(sent, sum(len(prompt.hashes) for prompt in sent), BLOCK_SIZE),
        find_losses(served, ideal, sum(fetched.values()), setup.pool_blocks, BLOCK_SIZE),
        len(sent) / seconds,
    )


def hit_table(runs: Sequence[HitRun]) -> str:
    """A Markdown table, one row for each run."""
    places = list(dict.fromkeys(place for run in runs for place in run.fetched_tokens))
    heads = ["", "requests", "prompt tokens", "local", *places, "hit rate", "ideal", "of the ideal", "ideal + decode"]
    heads += ["lost to split", "placement", "timing", "req/s"]
    return table(heads, [_cells(run, places) for run in runs])


def _cells(run: HitRun, places: Sequence[str]) -> list[str]:
    return [
        run.setup.name,
        f"{run.num_requests:,}",
        f"{run.num_prompt_tokens:,}",
        f"{run.num_local_tokens:,}",
        *(f"{run.fetched_tokens.get(place, 0):,}" for place in places),
        f"{run.hit_rate:.1%}",
        f"{run.ideal_rate:.1%}",
        f"{run.ratio:.1%}",
        f"{run.num_ideal_with_decode_tokens / run.num_prompt_tokens:.1%}",
        *(f"{value:,}" for value in (run.losses.split, run.losses.placement, run.losses.timing)),
        f"{run.requests_per_s:.1f}",
    ]
