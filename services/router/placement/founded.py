"""Step times of workers whose own fit rests on few kinds of steps: taken from a worker whose fit rests on more.

A fit says nothing of steps that its worker has not run: one that has decoded alone, or computed one prompt, may be off
by a factor of 40 at prompts. What it is good at is what its worker does just now. So such a worker has the coefficients
of the well-founded worker that is nearest to it there, times the ratio of the two there, of answers and of prompts: the
shape is the fleet's, the speed its own. That one part of its fit rests on enough kinds does not make it its own: in
simulated fleets that was worse, for the parts of a fit make up for each other's errors.

A report takes the same time however many workers there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Protocol

from services.router.placement.beside import DEFAULT_BUDGET
from shared.sizing.step_time import StepKinds, StepTimes, StepWork

FEWEST_KINDS = 4
"""Fewest kinds of chunks, and of batches of answers, on which a worker's own fit has to rest to count."""
MOST_COMPARED = 8
"""Well-founded workers, those that differ most, which another one is compared with."""
LEAST_S = 1e-9
"""Least time of a step: a worker whose fit says that steps take no time is not to be divided by."""
_TYPICAL = (StepWork(8, 8192), StepWork(64, 65536), StepWork(0, 0, 1024, 1 << 19, 1))
MOST_RATIO = 8.0
"""Bounds how much slower or quicker than these a worker is taken for."""


class Reported(Protocol):
    """A worker as its newest report has it, and what was placed since: see `WorkerView`."""

    name: str
    max_step_tokens: int
    num_queued_tokens: int
    num_queued_pairs: float
    num_decoding: int
    num_context_tokens: int
    num_promised: int
    num_promised_tokens: int


class FoundedTimes:
    """Step times of the workers of one pool."""

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}
        self._founded: dict[str, StepTimes] = {}

    def times(self, view: Reported, own: StepTimes | None, kinds: StepKinds) -> StepTimes | None:
        """What the worker's steps are taken to last, whose newest report is in the view, and whose own fit is `own` and
        rests on those kinds (of none: it is of an earlier release, which does not say); None: it has none yet."""
        seen = self._workers.setdefault(view.name, _Seen())
        seen.note(view)
        if own is None or not any(kinds):
            return own
        if min(kinds) >= FEWEST_KINDS:
            self._learn(view.name, seen, own)
            return own
        works = seen.works(kinds)
        if not self._founded or not works:
            return own
        ratios = [(_ratios(works, own, times), times) for times in self._founded.values()]
        (of_answers, of_prompts), nearest = min(ratios, key=lambda each: sum(abs(math.log(one)) for one in each[0]))
        return replace(
            nearest.scaled(of_answers),
            token_s=nearest.token_s * of_prompts,
            attention_s=nearest.attention_s * of_prompts,
        )

    def _learn(self, name: str, seen: _Seen, own: StepTimes) -> None:
        """The newest fit of a well-founded worker. One that becomes so takes the place of one that is like another."""
        if name not in self._founded and seen.was_compared and len(self._founded) == MOST_COMPARED:
            return
        seen.was_compared = True
        self._founded[name] = own
        if len(self._founded) > MOST_COMPARED:
            pairs = combinations(self._founded.items(), 2)
            (alike, _), _ = min(pairs, key=lambda pair: _difference(pair[0][1], pair[1][1]))
            del self._founded[alike]

    def forget(self, name: str) -> None:
        """The worker is gone; unknown names are ignored."""
        self._workers.pop(name, None)
        self._founded.pop(name, None)


class _Seen:
    """What one worker did last, at which its own fit is good."""

    __slots__ = ("_answers", "_chunk", "_next", "_num_queued", "was_compared")

    def __init__(self) -> None:
        self.was_compared = False
        """Others have been compared with it."""
        self._answers: StepWork | None = None  # the newest step of answers …
        self._chunk: StepWork | None = None  # … and of a prompt without any
        self._next: StepWork | None = None  # of the queue at the newest report, not known to be computed …
        self._num_queued = 0  # … and its tokens

    def works(self, kinds: StepKinds) -> list[StepWork]:
        """Answers, a chunk, or both, as far as its fit knows any of that."""
        found = [(self._answers, kinds.num_batches), (self._chunk, kinds.num_chunks)]
        return [work for work, num_kinds in found if work is not None and num_kinds]

    def note(self, view: Reported) -> None:
        """What the worker does by its newest report."""
        num_answers, num_queued = view.num_decoding - view.num_promised, view.num_queued_tokens
        chunk, self._next = self._next, None
        if chunk is not None and num_queued < self._num_queued and num_answers <= 0:  # a part of it was computed
            self._chunk = chunk
        self._num_queued = num_queued
        if num_queued > 0:
            num_tokens = min(num_queued, view.max_step_tokens or DEFAULT_BUDGET)
            self._next = StepWork(0, 0, num_tokens, round(view.num_queued_pairs * num_tokens / num_queued), 1)
        if num_answers > 0:
            self._answers = StepWork(num_answers, view.num_context_tokens - view.num_promised_tokens)


def _ratios(works: Sequence[StepWork], own: StepTimes, other: StepTimes) -> tuple[float, float]:
    """Time of a worker's steps by its `own` fit over that by `other`: (of answers, of prompts); a kind of steps that it
    has not run has the other kind's."""
    found = [own.step_s(work) / max(other.step_s(work), LEAST_S) for work in works]
    bounded = [min(MOST_RATIO, max(1 / MOST_RATIO, ratio)) for ratio in found]
    return bounded[0], bounded[-1]


def _difference(one: StepTimes, other: StepTimes) -> float:
    """How far two cards are from each other, at answers and at prompts."""
    return sum(abs(math.log(max(one.step_s(work), LEAST_S) / max(other.step_s(work), LEAST_S))) for work in _TYPICAL)
