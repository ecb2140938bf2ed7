"""`python -m loadtest.bench index`: the cost of the fleet's block index by its size: a match, a publish, memory.

All parts are real: Valkey, the KV store's process and its client over gRPC. Every `Match` is followed by a bare MGET of
the same keys over redis-py in this process: the floor for any store, on this machine at this moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import uvloop

from loadtest.bench.index.index_bench import PROMPT_BLOCKS, running_index
from loadtest.rig.command_line import Option, Out, integers
from loadtest.rig.measure import median_ratio, percentile
from loadtest.rig.results import Report, Result, machine

GOAL_MATCH_MS = {50: 1.0, 99: 2.5}
GOAL_RATIO = 1.6
"""Goal for match over bare MGET: 1.0 ms / 0.62 ms."""
GOAL_PUBLISH = 50_000.0
GOAL_BYTES = 100.0


async def run(sizes: Sequence[int], pairs: int, report: Report) -> None:
    """Grows one index through all sizes and measures at each."""
    async with running_index() as bench:
        for size in sorted(sizes):
            rate = await bench.grow(size)
            ours, bare = await bench.match_and_mget(pairs)
            report.add(_match_results(f"{size:,} blocks", ours, bare))
            cpu_ms, used = await bench.store_cpu_ms(min(pairs, 500)), await bench.bytes_per_block()
            report.add(
                [
                    Result(f"store CPU of a match, {size:,} blocks", cpu_ms, "ms"),
                    Result(f"publish, {size:,} blocks", rate, "blocks/s", GOAL_PUBLISH, rate / GOAL_PUBLISH),
                    _at_most(f"memory, {size:,} blocks", used, "B/block", GOAL_BYTES),
                ]
            )


def _match_results(size: str, ours: list[float], bare: list[float]) -> list[Result]:
    pairs = median_ratio(bare, ours)
    results = []
    for percent in (50, 99):
        own, peer = percentile(ours, percent), percentile(bare, percent)
        ratio = pairs if percent == 50 else peer / own
        goal = GOAL_MATCH_MS[percent]
        name = f"match {PROMPT_BLOCKS} p{percent}, {size}"
        results.append(Result(name, own, "ms", goal, goal / own, f"MGET {peer:.3g} ms", ratio))
    results.append(_at_most(f"match / MGET, median of pairs, {size}", 1 / pairs, "x", GOAL_RATIO))
    return results


def _at_most(name: str, value: float, unit: str, goal: float) -> Result:
    return Result(name, value, unit, goal, goal / value)


def main(
    blocks: Annotated[str, Option(help="sizes of the index")] = "100000 1000000",
    pairs: Annotated[int, Option(help="matches, each with an MGET, at every size")] = 2000,
    out: Out = None,
) -> None:
    """Measure the fleet's block index by its size: a match, a publish, memory a block."""
    sizes = integers(blocks, "blocks")
    report = Report(out)
    uvloop.run(run(sizes, pairs, report))
    print(f"The limit is the goal; above 100 % is better than the goal. Machine: {machine()}\n")
    report.print()
