"""TTFT of prompts whose prefix no worker holds any more, but the store may.

First each prefix is computed once. The pools are so small that all have evicted it when it returns with a new question.
Each such prompt alternates with a fresh one of the same length, which gives the time of computing all of it on this
machine at this moment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.bench.prefix.client import Client, Outcome
from loadtest.bench.prefix.clusters import Setup, make_cluster
from loadtest.bench.prefix.prompts import make_prompt
from loadtest.rig.markdown import table
from loadtest.rig.models import DEMO
from loadtest.rig.results import Result
from loadtest.workloads.tokens import Span, TokenSource
from shared.settings.common import PrefixFetch

PREFIX_TOKENS = 960
QUESTION_TOKENS = 32
POOL_BLOCKS = 256
"""Pool of each worker: room for the last four prompts."""
STORE_BLOCKS = 8192
WARM_UP_PROMPTS = 4
"""Prompts that return first and are not counted: the workers learn the link's speed from them."""
LINKS = {"": 0.0, "1 Gbit/s": 125e6, "100 Mbit/s": 12.5e6}
"""Bytes a second that the store sends; 0 = no limit."""
_WAYS: dict[str, PrefixFetch] = {"compute only": "never", "fetch only": "always", "both": "auto"}


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
        name = self.setup.name
        ratio = self.fresh_ttft_s / self.ttft_s
        peer = f"never seen: {1e3 * self.fresh_ttft_s:.1f} ms"
        return [
            Result(f"TTFT p50, {name}", 1e3 * self.ttft_s, "ms", peer=peer, ratio=ratio),
            Result(f"prompt tokens not computed, {name}", 100 * self.cached_share, "%"),
        ]


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


def ttft_table(runs: Sequence[TtftRun]) -> str:
    """A Markdown table, one row for each run."""
    rows = [
        (
            run.setup.name,
            f"{1e3 * run.ttft_s:.1f} ms",
            f"{1e3 * run.fresh_ttft_s:.1f} ms",
            f"{run.ttft_s / run.fresh_ttft_s:.2f}",
            f"{run.cached_share:.1%}",
        )
        for run in runs
    ]
    return table(("", "TTFT p50", "never seen, in turn", "ratio", "not computed"), rows)
