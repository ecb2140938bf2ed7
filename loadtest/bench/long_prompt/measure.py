"""`python -m loadtest.bench long-prompt`: the effect of arriving long prompts on the inter-token latency of others.

A steady batch of answers streams while long prompts arrive one after the other; windows with and without them alternate
within one batch, and the systems take turns.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Annotated

from loadtest.baseline.systems import Candidate, Hardware, System, adaptive, collocated, disaggregated, make_cluster
from loadtest.bench.long_prompt.running_answers import Load, Pair
from loadtest.rig.clients import started
from loadtest.rig.command_line import Option, Out, choice, names
from loadtest.rig.measure import turns
from loadtest.rig.models import SERVED, write_model
from loadtest.rig.processes import pin_all_but
from loadtest.rig.results import Report, Result
from loadtest.workloads.tokens import TokenSource

GOAL_RATIO = 1.1
"""Goal of all but the collocated systems: a long prompt changes the p99 of the running answers by less than 10 %."""
CHUNKS_PER_PROMPT = 8
SYSTEMS = (disaggregated(1, 2), adaptive(2), collocated(2), collocated(1))
_NUM_KV_BLOCKS = 8192
"""Blocks of all workers of a system together."""
_WORKERS = ("prefill", "decode", "worker")
"""How the names of the workers' processes begin."""
_NAMES = [system.name for system in SYSTEMS]


def median_of(pairs: Iterable[Pair], figure: str) -> float:
    """Median of the pairs' figures; of a ratio, the median of the pairs' ratios."""
    return float(median(map(attrgetter(figure), pairs)))


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
    compared = [system for system in SYSTEMS if system.name in wanted]
    num_long_tokens = CHUNKS_PER_PROMPT * chunk

    async def measure(folder: Path, scratch: Path) -> dict[str, list[Pair]]:
        """Pairs by system name. All systems run at once and are measured in turns, while the others idle."""
        measured: dict[str, list[Pair]] = {system.name: [] for system in compared}
        clusters = [
            make_cluster(
                Candidate(system, chunk), Hardware(folder, "cpu", _NUM_KV_BLOCKS // system.num_workers), scratch
            )
            for system in compared
        ]
        async with started(clusters) as clients:
            children = [child for cluster in clusters for child in cluster.children.items()]
            pin_all_but([child.pid for name, child in children if name.startswith(_WORKERS)])
            loads = {
                system.name: Load(client, answers, num_long_tokens, window, TokenSource(seed))
                for system, client in zip(compared, clients, strict=True)
            }
            for each in loads.values():  # warm-up: one-time allocations and compilations
                await each.pair(busy_first=True)
            for turn, system in turns(compared, pairs):
                measured[system.name].append(await loads[system.name].pair(busy_first=turn % 2 == 1))
        return measured

    with tempfile.TemporaryDirectory(prefix="tandem-long-prompt-") as scratch:
        folder = model or write_model(Path(scratch) / f"random-{shape}", SERVED[shape], tokenizer)
        measured = asyncio.run(measure(folder, Path(scratch)))
    print(
        f"{answers} answers, prompts of {num_long_tokens} tokens one after the other, "
        f"chunks of {chunk}, {pairs} pairs of {window:g} s"
    )
    report = Report(out)
    report.add(results(compared, measured))
    report.print()


_FIGURES = (
    ("ITL p99 without long prompts", "quiet_p99_ms", "ms"),
    ("ITL p99 with long prompts", "busy_p99_ms", "ms"),
    ("ITL p99 with over without", "p99_ratio", ""),
    ("ITL p50 with over without", "p50_ratio", ""),
    ("TTFT p50 of the long prompts", "prompt_ttft_ms", "ms"),
    ("long prompts a pair", "num_prompts", "prompts"),
)
"""Name, field of a pair, unit."""


def results(systems: Sequence[System], measured: dict[str, list[Pair]]) -> list[Result]:
    """The figures for scripts; the best collocated system is the peer of the others."""
    ratios = {system.name: median_of(measured[system.name], "p99_ratio") for system in systems}
    peers = [system for system in systems if system.mode == "collocated"]
    peer = min(peers, key=lambda system: ratios[system.name], default=None)
    found = []
    for system in systems:
        for title, figure, unit in _FIGURES:
            result = Result(f"{system.name}: {title}", median_of(measured[system.name], figure), unit)
            if figure == "p99_ratio" and system.mode != "collocated":
                result = replace(result, limit=GOAL_RATIO)
                if peer is not None:
                    result = replace(result, peer=peer.name, ratio=ratios[peer.name] / result.value)
            found.append(result)
    return found
