"""`python -m loadtest.bench speculation`: answers with guesses beside the same answers without, in turns.

The weights are random, so a text is given as the answer: every step is computed in full, and each token that it chose
is replaced by the text's. So steps take what they take, and guesses are right as often as in real texts. A draft model
likewise computes with random weights, and guesses what the demo model's draft guesses of the demo model's answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.speculation.engines import AUTO, DRAFT, DRAFT_ALONE, HEADS, OFF, Bench
from loadtest.bench.speculation.given_answers import StepTimes
from loadtest.bench.speculation.texts import CASES
from loadtest.rig.command_line import Option, Out, integers, names
from loadtest.rig.measure import median_ratio, turns
from loadtest.rig.models import SHAPES, model_folder
from loadtest.rig.results import Report, Result, machine
from shared.errors import ConfigError

OF_DRAFTS = ("greedy", "sampled")
"""Cases in which a draft model guesses too."""
GOALS = {"edit": 2.0, "quotes": 2.0, "chat": 0.98, "json": 1.5, "record": 1.5, "greedy": 1.5, "sampled": 1.5}
"""Goals for the ratio of one stream, with a draft model where there is one."""


GOAL_OF_HEADS = 1.8
"""Goal for the ratio of one stream in OF_DRAFTS."""


def measure(
    bench: Bench, case: str, batch: int, num_tokens: int, pairs: int, warm_up: int, follow: int = 0
) -> Iterator[Result]:
    """The rate of each way over that without guesses, median of pairs in turns; what was guessed in it. Then the same
    by the times of kinds of steps, which a busy moment of the machine does not change. With `follow`, the number of
    further answers of each place, the next one begins where one has ended, and only steps count in which every place
    is taken."""
    texts = [CASES[case](number) for number in range(batch * (1 + follow))]
    ways = [way for way in bench.speculators if case in OF_DRAFTS or way not in (DRAFT, DRAFT_ALONE, HEADS)]
    num_answered = batch * (num_tokens - 1)

    def rate(way: str) -> float:
        if follow:
            return bench.full_rate(way, texts, batch, num_tokens)
        return num_answered / bench.seconds(way, texts, num_tokens)

    bench.note_steps(None)
    for way in warm_up * ways:  # what they learn is known
        rate(way)
    before = {way: _counts(bench, way) for way in ways}
    steps = None if bench.is_async else StepTimes()
    bench.note_steps(steps)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _, way in turns(ways, pairs):
        rates[way].append(rate(way))
    name = f"{case} {batch}, full" if follow else f"{case} {batch}"
    yield Result(f"{name}, {OFF}", median(rates[OFF]), "tok/s")
    for way in ways[1:]:
        ratio = median_ratio(rates[way], rates[OFF])
        yield Result(f"{name}, {way}", median(rates[way]), "tok/s", peer=OFF, ratio=ratio)
        guessed, right = (now - then for now, then in zip(_counts(bench, way), before[way], strict=True))
        if guessed:
            yield Result(f"{name}, {way}, right guesses", 100 * right / guessed, "%")
    if steps is None:
        return
    if follow:
        yield from _by_kinds(name, steps.rates(batch), ways)
        return
    for way in ways:
        yield Result(f"{name}, {way}, decode steps", steps.num_steps(way), "steps")
    yield from _by_kinds(name, {way: num_answered / seconds for way, seconds in steps.run_s().items()}, ways)


def _by_kinds(name: str, rates: Mapping[str, float], ways: Sequence[str]) -> Iterator[Result]:
    """Each way's rate by `StepTimes`, over that without guesses; that of `auto` over the best other one."""
    for way in ways:
        ratio = rates[way] / rates[OFF]
        yield Result(f"{name}, {way}, by kinds of steps", rates[way], "tok/s", peer=OFF, ratio=ratio)
    best = max((way for way in ways if way == OFF or way.isdecimal()), key=rates.__getitem__)
    ratio = rates[AUTO] / rates[best]
    yield Result(f"{name}, {AUTO} over the best, by kinds of steps", rates[AUTO], "tok/s", peer=best, ratio=ratio)


def _counts(bench: Bench, way: str) -> tuple[int, int]:
    speculator = bench.speculators[way]
    if speculator is None:
        return 0, 0
    counters = speculator.counters
    return sum(counters.num_guesses.values()), sum(counters.num_accepted.values())


def main(
    model: Annotated[str, Option(help=f"a model folder, or a shape: {', '.join(SHAPES)}")] = "1b",
    case: Annotated[str, Option(help=f"kinds of answers: {', '.join(CASES)}")] = " ".join(CASES),
    batch: Annotated[str, Option(help="answers that run together")] = "1 8",
    draft: Annotated[
        str, Option(help="a folder, or a shape as of MODEL, of what a draft model computes; empty: none")
    ] = "",
    heads: Annotated[
        str,
        Option(help="the folder that make demo-head writes, of a head whose guesses are measured; empty: none"),
    ] = "",
    fixed: Annotated[str, Option(help="numbers of guesses that are made whatever they cost; empty: none")] = "",
    prompt: Annotated[int, Option(help="most tokens of a prompt; 0 = all")] = 0,
    penalty: Annotated[float, Option(help="repetition_penalty of all answers")] = 1.0,
    tokens: Annotated[int, Option(help="of each answer")] = 256,
    pairs: Annotated[int, Option(help="runs of each way")] = 5,
    warm_up: Annotated[int, Option(help="runs of each way before, from which auto learns")] = 1,
    follow: Annotated[
        int, Option(help="answers that begin in each place of a batch as it becomes free; 0: none, a batch runs out")
    ] = 0,
    again: Annotated[bool, Option(help="measure equal ways twice, to see what the machine does")] = False,
    threads: Annotated[int, Option(help="compute threads; 0 = all cores")] = 0,
    device: Annotated[str, Option(help="cpu, or a GPU as torch names it: without draft, heads and structures")] = "cpu",
    out: Out = None,
) -> None:
    """Measure answers with guesses beside the same without: copied text, prose and JSON, alone and in batches."""
    if device != "cpu" and (draft or heads):
        raise ConfigError("draft models and heads are measured on CPUs", field="device", value=device)
    folder, of_draft = (model_folder(name) for name in (model, draft or model))
    report, batches = Report(out), integers(batch, "batch")
    bench = Bench(
        folder,
        threads,
        integers(fixed, "fixed"),
        of_draft if draft else None,
        Path(heads) if heads else None,
        prompt or None,
        penalty,
        device,
        again,
        max(batches),
    )
    try:
        for name in names(case, "case", CASES):
            if device != "cpu" and CASES[name](0).structure is not None:
                continue  # masks of steps ahead follow what the device chose, not the text
            for count in batches:
                report.add(measure(bench, name, count, tokens, pairs, warm_up, follow))
    finally:
        bench.close()
    where = machine() if device == "cpu" else torch.cuda.get_device_name(device)
    print(f"{model} in bf16 on {where}; ratios are times without guesses over times with\n")
    report.print()
    ratios = {result.name: result.ratio for result in report.results if result.ratio is not None}
    for name, goal in GOALS.items():
        way = DRAFT if name in OF_DRAFTS else AUTO
        if (ratio := ratios.get(f"{name} 1, {way}")) is not None:
            print(f"{'met' if ratio >= goal else 'missed'}: {name}: {ratio:.2f}, the goal is {goal:g}")
    for name in OF_DRAFTS:
        if (ratio := ratios.get(f"{name} 1, {HEADS}")) is not None:
            met = "met" if ratio >= GOAL_OF_HEADS else "missed"
            print(f"{met}: {name} with heads: {ratio:.2f}, the goal is {GOAL_OF_HEADS:g}")
