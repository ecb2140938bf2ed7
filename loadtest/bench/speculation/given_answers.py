"""Steps that are computed in full and choose the tokens of given answers; and how long they take, by what they hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from shared.engine.engine import StepRunner
from shared.engine.plan import LaunchedStep, SampledToken, StepPlan, StepResult
from shared.engine.runner.block_access import BlockAccess
from shared.kernels.lora.step import PackedAdapter

_NEAR = 8
"""Steps before and behind one, by which it is known how slow the machine is."""
_PASSES = 5


class _Kind(NamedTuple):
    """What decode steps have in common that take about as long: lengths of text differ too little to matter."""

    runner: int
    num_sequences: int
    num_guesses: int


class _Step(NamedTuple):
    kind: _Kind
    step_s: float
    before_s: float | None  # between the step before and this one; None: that one was of prompts
    num_tokens: int


class StepTimes:
    """Times of decode steps, and of what the host did before each, over runs of several ways to guess.

    Steps of one kind take as long whatever guessed for them, so all ways share each kind's time, and only the time
    before a step is of the way itself. A kind's time is a median over its steps, each divided by how slow the machine
    was just then: as the steps around it were, by the times of their own kinds (a median polish, Tukey 1977). So a
    moment in which the machine did something else changes no ratio of two ways, as it does where their runs are
    compared.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[str, list[_Step]]] = []
        self._ended_s = 0.0  # of the step before in this run; 0: none, or with prompts

    def begin_run(self, way: str) -> None:
        """The next steps are of a further run of this way."""
        self._runs.append((way, []))
        self._ended_s = 0.0

    def ended(self, plan: StepPlan, runner: int, launched_s: float, ended_s: float, num_tokens: int) -> None:
        """A step of the run, which gave answers that many tokens, by a clock in seconds."""
        if not all(item.is_decode for item in plan.sequences):
            self._ended_s = 0.0
            return
        before_s = launched_s - self._ended_s if self._ended_s else None
        kind = _Kind(runner, len(plan.sequences), plan.num_guesses)
        self._runs[-1][1].append(_Step(kind, ended_s - launched_s, before_s, num_tokens))
        self._ended_s = ended_s

    def num_steps(self, way: str) -> float:
        """Decode steps of a run, in the mean."""
        runs = [steps for name, steps in self._runs if name == way]
        return sum(map(len, runs)) / len(runs)

    def run_s(self) -> dict[str, float]:
        """By way the seconds of a run's decode steps, each taken to last as long as those of its kind."""
        num_runs = Counter(way for way, _ in self._runs)
        return {way: seconds / num_runs[way] for way, seconds in self._totals_s(lambda _: True).items()}

    def rates(self, num_sequences: int) -> dict[str, float]:
        """By way, its tokens a second in the decode steps that hold `num_sequences` answers, each step taken to last as
        long as those of its kind."""
        num_tokens = Counter[str]()
        for way, steps in self._runs:
            num_tokens[way] += sum(step.num_tokens for step in steps if step.kind.num_sequences == num_sequences)
        seconds = self._totals_s(lambda kind: kind.num_sequences == num_sequences)
        return {way: num_tokens[way] / total_s for way, total_s in seconds.items()}

    def _totals_s(self, counts: Callable[[_Kind], bool]) -> dict[str, float]:
        """By way the seconds of all its runs' steps of the kinds that count."""
        kinds, before = self._kinds_s(), defaultdict[tuple[str, _Kind], list[float]](list)
        for way, steps in self._runs:
            for step in steps:
                before[way, step.kind] += [] if step.before_s is None else [step.before_s]
        totals = defaultdict[str, float](float)
        for way, steps in self._runs:
            of_kinds = Counter(step.kind for step in steps if counts(step.kind))
            for kind, count in of_kinds.items():
                totals[way] += count * (kinds[kind] + median(before[way, kind] or [0.0]))
        return totals

    def _kinds_s(self) -> dict[_Kind, float]:
        found: dict[_Kind, float] = {}
        for _ in range(_PASSES):
            even = defaultdict[_Kind, list[float]](list)
            for _, steps in self._runs:
                slow = [step.step_s / found.get(step.kind, 1.0) for step in steps]
                for place, step in enumerate(steps):
                    around = slow[max(0, place - _NEAR) : place] + slow[place + 1 : place + 1 + _NEAR]
                    even[step.kind].append(step.step_s / (median(around) if found and around else 1.0))
            found = {kind: median(values) for kind, values in even.items()}
        return found


class GivenAnswers:
    """A `StepRunner` that computes as another one and chooses the tokens of given answers."""

    def __init__(
        self, runner: StepRunner, clock: Callable[[], float], answers: dict[str, Sequence[int]] | None = None
    ) -> None:
        """`clock`: in seconds."""
        self._runner = runner
        self.clock = clock
        """The clock of `times`, seconds."""
        self.answers: dict[str, Sequence[int]] = {} if answers is None else answers
        """The given answers by sequence id."""
        self.times: StepTimes | None = None
        """What steps are noted in; not those that are launched ahead, which wait for one another."""

    @property
    def is_async(self) -> bool:
        """See `StepRunner`."""
        return self._runner.is_async

    @property
    def blocks(self) -> BlockAccess:
        """See `StepRunner`."""
        return self._runner.blocks

    def checksums(self, block_ids: list[int]) -> list[int]:
        """See `StepRunner`."""
        return self._runner.checksums(block_ids)

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """See `StepRunner`."""
        self._runner.place_adapter(slot, adapter)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See `StepRunner`."""
        launched_s = self.clock()
        return _Given(self._runner.launch(plan), plan, self, launched_s)


@dataclass(frozen=True)
class _Given:
    step: LaunchedStep
    plan: StepPlan
    runner: GivenAnswers
    launched_s: float

    def result(self) -> StepResult:
        self.step.result()
        times, answers = self.runner.times, self.runner.answers
        given = [
            [SampledToken(answers[item.sequence_id][spec.position - item.num_prompt_tokens]) for spec in item.samples]
            for item in self.plan.sequences
        ]
        if times is not None and not self.runner.is_async:
            kept = zip(self.plan.sequences, given, strict=True)
            num_tokens = sum(item.num_kept(chosen) for item, chosen in kept if chosen)
            times.ended(self.plan, id(self.runner), self.launched_s, self.runner.clock(), num_tokens)
        return StepResult(tuple(token for chosen in given for token in chosen))
