"""`make bench-prefix`: how much prefill a fleet spares, and what a prefix from the store is worth.

Hits: a trace of conversations through real workers, 1, 2 and 4 in either pool, in the trace's order as fast as they
serve it; in turn with a router that has no index, and with a store. The pools have the same number of blocks together,
however many workers share them. Times: TTFT with and without a store, over links of several speeds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import loadtest
from loadtest.bench.prefix.clusters import Setup, write_tiny_model
from loadtest.bench.prefix.hits import GOAL, HitRun, hit_table, measure_hits
from loadtest.bench.prefix.prompts import read_prompts
from loadtest.bench.prefix.ttft import TtftRun, measure_ttft, ttft_setups, ttft_table
from loadtest.figures import Result, machine, write
from loadtest.workloads.tokens import TokenSource
from shared.errors import TandemError

_SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
_PARTS = ("index", "no-index", "store", "ttft")
_VOCAB_SIZE = 3000
"""Tokens that every vocabulary here has."""


def hit_setups(options: argparse.Namespace, model: Path) -> Iterator[Setup]:
    """The clusters that play the trace."""
    for num_workers in options.workers:
        pool_blocks = options.blocks // num_workers
        title = f"{num_workers} a pool"
        if "index" in options.parts:
            yield Setup(f"{title}, index", model, num_workers, pool_blocks)
        if "no-index" in options.parts and num_workers > 1:
            yield Setup(f"{title}, no index", model, num_workers, pool_blocks, indexed=False)
        if "store" in options.parts:
            yield Setup(f"{title}, index and store", model, num_workers, pool_blocks, options.store_blocks)


async def run(options: argparse.Namespace) -> None:
    """All parts that were asked for; prints the tables, and writes the results as soon as a cluster is done."""
    source = TokenSource(options.seed, _VOCAB_SIZE)
    hits: list[HitRun] = []
    times: list[TtftRun] = []
    results: list[Result] = []
    prompts = read_prompts(options.trace, options.requests, options.scale_output, source)

    def note(run: HitRun | TtftRun, text: str) -> None:
        print(f"{run.setup.name}: {text}", flush=True)
        results.extend(run.results())
        if options.out:
            write(options.out, results)

    with tempfile.TemporaryDirectory() as folder:
        for setup in hit_setups(options, write_tiny_model(Path(folder))):
            hits.append(await measure_hits(setup, prompts, options.in_flight, options.limit))
            note(hits[-1], f"{hits[-1].num_requests} requests, {hits[-1].ratio:.1%} of the ideal")
    for setup in ttft_setups() if "ttft" in options.parts else ():
        times.append(await measure_ttft(setup, options.ttft_prompts, source))
        note(times[-1], f"TTFT p50 {1e3 * times[-1].ttft_s:.1f} ms")
    if hits:
        print(f"\n{options.blocks:,} blocks in all prefill pools, the goal is {GOAL:.0%} of the ideal\n")
        print(hit_table(hits))
    if times:
        print(f"\n{options.ttft_prompts} prompts each\n\n{ttft_table(times)}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=_SLICE, help="Mooncake JSON lines; default: the shipped slice")
    parser.add_argument("--requests", type=int, default=1500, help="of the trace, from its start")
    parser.add_argument("--scale-output", type=int, default=128, help="divides the trace's answer lengths")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="in either pool")
    parser.add_argument("--blocks", type=int, default=8192, help="of 16 tokens, of all prefill pools together")
    parser.add_argument("--store-blocks", type=int, default=8192, help="of the store's host memory")
    parser.add_argument("--in-flight", type=int, default=8, help="requests at once")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a cluster is sent no more")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure")
    parser.add_argument("--ttft-prompts", type=int, default=16, help="whose prefix comes back, a cluster")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' tokens")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    print(machine())
    try:
        asyncio.run(run(options))
    except* TandemError as errors:
        raise SystemExit("; ".join(str(error) for error in errors.exceptions)) from None


if __name__ == "__main__":
    main()
