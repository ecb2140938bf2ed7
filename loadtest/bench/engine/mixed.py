"""Steps of the engine that decode and compute a prompt's chunk at once, beside those that do one of the two.

Every step runs once a round, in an order that turns by one step a round: a machine whose speed drifts drifts for all of
them. A step's time is the median of its rounds. From a half of the steps the model of step times is fitted, and from
the steps that do one thing only; both predict the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.figures import Result
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.sampling_params import SamplingParams

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class MixedStep:
    """`num_decodes` sequences that decode behind `start` tokens, and a prompt's next `chunk` tokens behind `before`."""

    num_decodes: int
    start: int
    chunk: int
    before: int = 0

    @property
    def name(self) -> str:
        """As the report has it."""
        behind = f" behind {self.before}" if self.before else ""
        chunk = f"chunk of {self.chunk}{behind}"
        if not self.num_decodes:
            return chunk
        decodes = f"{self.num_decodes} decodes at {self.start}"
        return f"{decodes} and a {chunk}" if self.chunk else decodes

    @property
    def num_tokens(self) -> int:
        """Computed by the step."""
        return self.num_decodes + self.chunk

    @property
    def num_blocks(self) -> int:
        """Of all its sequences."""
        return max(self.plan(2).sequences[-1].block_ids) + 1

    def plan(self, vocab_size: int) -> StepPlan:
        """Each sequence with blocks of its own, all of them greedy."""
        items, begin = [], 0
        chunk = [(self.before, self.chunk)] if self.chunk else []
        for index, (start, count) in enumerate([*[(self.start, 1)] * self.num_decodes, *chunk]):
            end = begin - (-(start + count) // BLOCK_SIZE)
            tokens = tuple((7 * index + 13 * j) % vocab_size for j in range(count))
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
            spec = SampleSpec(params, start + count)
            items.append(PlannedSequence(f"s{index}", tokens, start, tuple(range(begin, end)), start + count, spec))
            begin = end
        return StepPlan(tuple(items))


def mixed_steps(contexts: Sequence[int], decodes: Sequence[int], chunks: Sequence[int]) -> list[MixedStep]:
    """Each chunk beside each batch, at the contexts in turn; and every chunk and every batch alone."""
    behind = (0, 512)
    alone = [MixedStep(0, 0, chunk, before) for chunk in chunks for before in behind]
    batches = [MixedStep(count, context, 0) for context in contexts for count in decodes]
    both = [
        MixedStep(count, contexts[(i + j) % len(contexts)], chunk, behind[(i + j // 2) % 2])
        for i, count in enumerate(decodes)
        for j, chunk in enumerate(chunks)
    ]
    return alone + batches + both


def in_rounds(steps: Sequence[MixedStep], run: Callable[[MixedStep], object], rounds: int) -> list[list[float]]:
    """Seconds of each step's runs, one a round; a run before the first round warms up."""
    found: list[list[float]] = [[] for _ in steps]
    for number in range(-1, rounds):
        for turn in range(len(steps)):
            index = (turn + max(0, number)) % len(steps)
            begin = time.perf_counter()
            run(steps[index])
            if number >= 0:
                found[index].append(time.perf_counter() - begin)
    return found


def medians(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Of each step's runs."""
    return [statistics.median(runs) for runs in seconds]


def results(steps: Sequence[MixedStep], seconds: Sequence[float]) -> list[Result]:
    """Milliseconds of each step."""
    return [Result(step.name, 1000 * taken, "ms") for step, taken in zip(steps, seconds, strict=True)]
