"""A worker's engine in virtual time: the real scheduler and block pool, and a clock in place of the runner.

The loop is that of `shared/engine/engine.py`: commands are taken between steps, and running one step ahead a step is
planned while the one before runs. Steps in which all running answers get a token each, and nothing else happens, are
not planned one by one: what the scheduler would do in them is done at once, as soon as something else happens.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadtest.simulator.clock import Clock
from shared.engine.messages import StepOutput
from shared.engine.plan import SampledToken, StepPlan, StepResult
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence
from shared.engine.step_work import step_work
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, PoolEvents
from shared.sizing.step_time import StepTimes, StepWork

MOST_STEPS = 256
"""Steps that are done at once."""
_TOKEN = SampledToken(0)

Command = Callable[[], None]
Factors = NDArray[np.float64]


class Noise:
    """Factors on the times of an engine's steps, the same ones again after many."""

    def __init__(self, residuals: Sequence[float], seed: str, count: int = 4096) -> None:
        """Drawn at random from `residuals`, the measured times of steps over those predicted; none: no noise."""
        rng = random.Random(seed)
        self._factors = rng.choices(list(residuals), k=count) if residuals else [1.0] * count
        self._twice = np.array(self._factors * 2)

    def of(self, number: int) -> float:
        """That of the step of this number."""
        return self._factors[number % len(self._factors)]

    def of_many(self, begin: int, count: int) -> Factors:
        """Those of `count` steps, from number `begin` on; no more than there are."""
        begin %= len(self._factors)
        return self._twice[begin : begin + count]


class EngineHost(Protocol):
    """What becomes of an engine's events. Each is called between two steps."""

    def on_started(self, sequence_id: str, num_cached_tokens: int) -> None:
        """A sequence had its first turn, or found more of its prompt in the pool."""

    def on_output(self, output: StepOutput) -> None:
        """A step ended."""

    def on_changed(self, events: PoolEvents) -> None:
        """Steps or commands may have changed what a load report says; `events` are the pool's."""


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    at_s: float  # when it was planned
    ends_s: float


class _DecodeRun:
    """Steps that give each of some sequences a token."""

    def __init__(self, batch: Sequence[EngineSequence], num_context: int, begin_s: float, steps_s: Factors) -> None:
        self.batch = batch
        self.num_context = num_context
        """Of the first step."""
        self.ends_s: list[float] = np.cumsum(np.concatenate(([begin_s], steps_s)))[1:].tolist()
        self.steps_s: list[float] = steps_s.tolist()
        self.num_done = 0


class Engine:
    """Commands in, events out. All at once where nothing is computed, else between two steps."""

    def __init__(
        self,
        clock: Clock,
        times: StepTimes,
        pool: BlockPool,
        config: SchedulerConfig,
        host: EngineHost,
        noise: Noise,
        *,
        num_ahead: int = 1,
        step_by_step: bool = False,
    ) -> None:
        """`num_ahead`: 1 as on a GPU, 0 as on a processor. `step_by_step`: plan every step, which is slower and
        changes nothing."""
        self.pool = pool
        self.scheduler = Scheduler(pool, config, lambda: clock.now_s)
        self.times = times
        self.num_steps = 0
        self.busy_s = 0.0
        """Time of all steps so far."""
        self._clock, self._host, self._noise = clock, host, noise
        self._num_ahead, self._step_by_step = num_ahead, step_by_step
        self._commands: deque[Command] = deque()
        self._launched: deque[_Launched] = deque()
        self._ends_s = 0.0  # of the step launched last
        self._busy_since_s: float | None = None  # of the last result, while steps follow each other
        self._run: _DecodeRun | None = None
        self._ticket = 0  # of the next event that is due: older ones are void
        self._is_waiting = True  # for a command
        self._is_late = False  # the next step is planned when the one that runs ends

    def submit(self, command: Command) -> None:
        """Runs a command that calls the scheduler, between two steps."""
        self._commands.append(command)
        if self._is_waiting:
            self._is_waiting = False
            self._busy_since_s = None
            self._turn()
        elif self._run is not None and len(self._commands) == 1:
            self._end_run_early(self._run)

    @property
    def is_decoding(self) -> bool:
        """Whether steps are done at once: no event tells of each."""
        return self._run is not None

    def settle(self) -> None:
        """Brings scheduler and pool up to date, for one who looks at them between two steps."""
        if self._run is not None:
            self._apply(self._run, bisect_right(self._run.ends_s, self._clock.now_s))

    # --- turns

    def _turn(self) -> None:
        """Between two steps: takes commands, and launches what comes next."""
        if self._is_late:
            self._is_late = False
            self._launch()
        while True:
            while self._commands:
                self._commands.popleft()()
            if self._launched and self._launches_late():
                break
            if self._launch():
                if len(self._launched) > self._num_ahead:
                    break
            elif self._launched:
                break
            elif not self._commands:
                self._is_waiting = True
                self._changed()
                return
        self._changed()
        self._wait(self._launched[0].ends_s, self._collect)

    def _wait(self, until_s: float, call: Callable[..., None], *args: object) -> None:
        self._ticket += 1
        self._clock.at(until_s, self._on_time, self._ticket, call, args)

    def _on_time(self, ticket: int, call: Callable[..., None], args: tuple[object, ...]) -> None:
        if ticket == self._ticket:
            call(*args)

    def _launch(self) -> bool:
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return False
        begin_s = max(self._clock.now_s, self._ends_s)
        step_s = self.times.step_s(step_work(plan)) * self._noise.of(self.num_steps)
        self.num_steps += 1
        self.busy_s += step_s
        self._ends_s = begin_s + step_s
        self._launched.append(_Launched(plan, self._clock.now_s, self._ends_s))
        for sequence_id, num_cached in self.scheduler.take_started():
            self._host.on_started(sequence_id, num_cached)
        return True

    def _collect(self) -> None:
        """The oldest step has ended."""
        step = self._launched.popleft()
        now_s = self._clock.now_s
        begun_s = step.at_s if self._busy_since_s is None else self._busy_since_s
        self._busy_since_s = now_s
        num_sampled = sum(item.sample is not None for item in step.plan.sequences)
        result = StepResult((_TOKEN,) * num_sampled)
        output = self.scheduler.apply(step.plan, result, now_s - begun_s)
        self._host.on_output(output)
        self.scheduler.take_ended()
        if not (self._launched or self._commands) and self._begin_run(step.plan):
            self._changed()
        else:
            self._turn()

    def _changed(self) -> None:
        self._host.on_changed(self.pool.drain_events())

    # --- steps in which nothing but decoding happens

    def _launches_late(self) -> bool:
        """Whether the step behind the one that runs can be planned when that one ends: it will be the same."""
        step = self._launched[-1]
        self._is_late = len(self._launched) == 1 and self._is_pure(step.plan)
        return self._is_late

    def _is_pure(self, plan: StepPlan) -> bool:
        """Whether it, and all steps behind it that nothing comes between, give each running sequence a token."""
        scheduler = self.scheduler
        return (
            not self._step_by_step
            and scheduler.num_waiting == 0
            and scheduler.num_queued_tokens == 0
            and plan.num_tokens == len(plan.sequences) == scheduler.decoding.num_sequences
        )

    def _begin_run(self, last: StepPlan) -> bool:
        """Begins to do steps at once, behind a step that has just ended; False where they are too few."""
        scheduler = self.scheduler
        batch = [s for item in last.sequences if (s := scheduler.sequence(item.sequence_id)) is not None]
        if not batch or self._step_by_step or scheduler.num_waiting or scheduler.num_queued_tokens:
            return False
        decoding = scheduler.decoding
        if decoding.num_sequences != len(batch):
            return False
        num_steps = min(MOST_STEPS, min(_num_left(sequence) for sequence in batch) - 1)
        room = (self.pool.num_free - len(batch)) * self.pool.block_size // len(batch)
        num_steps = min(num_steps, room)
        if num_steps < 2:
            return False
        self._is_late = self._num_ahead > 0
        first_s = self.times.decode_step_s(len(batch), decoding.num_context_tokens)
        grown = first_s + np.arange(num_steps) * self.times.growth_s(len(batch))
        steps_s = grown * self._noise.of_many(self.num_steps, num_steps)
        self._run = _DecodeRun(batch, decoding.num_context_tokens, self._clock.now_s, steps_s)
        self._wait(self._run.ends_s[-1], self._end_run, self._run, num_steps)
        return True

    def _end_run_early(self, run: _DecodeRun) -> None:
        """The step that runs now is the last of the run."""
        num_steps = bisect_left(run.ends_s, self._clock.now_s) + 1
        self._wait(run.ends_s[num_steps - 1], self._end_run, run, num_steps)

    def _end_run(self, run: _DecodeRun, num_steps: int) -> None:
        self._apply(run, num_steps)
        self._run = None
        self._ends_s = self._busy_since_s = self._clock.now_s
        self._turn()

    def _apply(self, run: _DecodeRun, num_steps: int) -> None:
        """What the scheduler does in the steps of the run up to that number, as far as it is not done yet."""
        count = num_steps - run.num_done
        if count <= 0:
            return
        for sequence in run.batch:
            _advance(sequence, count, self.pool)
        batch, observe = len(run.batch), self.scheduler.step_fit.observe
        for number in range(run.num_done, num_steps):
            observe(StepWork(batch, run.num_context + number * batch), run.steps_s[number])
            self.busy_s += run.steps_s[number]
        run.num_done = num_steps
        self.num_steps += count


def _num_left(sequence: EngineSequence) -> int:
    """Tokens that it will still get."""
    max_tokens = sequence.sampling.max_tokens
    assert max_tokens is not None
    return min(max_tokens - sequence.num_output_tokens, sequence.max_tokens_total - sequence.num_tokens)


def _advance(sequence: EngineSequence, count: int, pool: BlockPool) -> None:
    """As many steps as `count` have given the sequence a token each."""
    block_size = pool.block_size
    sealed = sequence.num_computed_tokens // block_size
    sequence.token_ids.extend([_TOKEN.token_id] * count)
    sequence.num_computed_tokens += count
    full, partial = divmod(sequence.num_computed_tokens, block_size)
    missing = full + (partial > 0) - len(sequence.block_ids)
    if missing > 0:
        sequence.block_ids += pool.allocate(missing)
    if full > sealed:
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, block_size)
        for index in range(sealed, full):
            pool.seal(sequence.block_ids[index], sequence.block_hashes[index])
