"""A worker's engine in virtual time: the real scheduler and block pool, and a clock in place of the runner.

As in `shared/engine/engine.py`, commands are taken between two steps, and those that come while a step runs change the
next one, or the one behind it where steps are planned ahead. Steps in which each running answer gets a token, and
nothing else happens, are not planned one by one: what the scheduler would do in them is done at once, as soon as
something else happens.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loadtest.simulator.clock import Clock
from shared.engine.finish_reason import FinishReason
from shared.engine.messages import NewToken, StepOutput
from shared.engine.plan import SampledToken, StepPlan, StepResult, step_work
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, PoolEvents
from shared.sizing.step_time import StepTimes, StepWork

MOST_STEPS = 256
"""Steps that are done at once."""
OUTPUT_TOKEN = 0
"""All tokens of answers."""
_TOKEN = SampledToken(OUTPUT_TOKEN)

Command = Callable[[], None]
Factors = NDArray[np.float64]


class Noise:
    """Factors on the times of an engine's steps, the same ones again after many."""

    def __init__(self, residuals: Sequence[float], seed: str, count: int = 4096, stretch: int = 1) -> None:
        """Drawn at random from `residuals`, the measured times of steps over those predicted, each for `stretch` steps
        that follow each other; none: no noise."""
        rng = random.Random(seed)
        drawn = rng.choices(list(residuals), k=-(-count // stretch)) if residuals else [1.0] * count
        self._factors = [factor for factor in drawn for _ in range(stretch)][:count]
        self._twice = np.array(self._factors * 2)

    def of(self, number: int) -> float:
        """The factor of the step of this number."""
        return self._factors[number % len(self._factors)]

    def of_many(self, begin: int, count: int) -> Factors:
        """The factors of `count` steps, from number `begin` on; no more than there are."""
        begin %= len(self._factors)
        return self._twice[begin : begin + count]


class EngineHost(Protocol):
    """What becomes of an engine's events. Each is called between two steps."""

    def on_started(self, sequence_id: str, num_cached_tokens: int) -> None:
        """A sequence had its first turn, or found more of its prompt in the pool."""

    def on_output(self, output: StepOutput) -> None:
        """A step ended. Of steps that are done at once there are only the last tokens of answers."""

    def on_changed(self, events: PoolEvents) -> None:
        """Steps or commands may have changed what a load report says; `events` are the pool's."""


class _DecodeRun:
    """Steps that give each of some sequences a token."""

    def __init__(
        self, batch: Sequence[EngineSequence], num_context: int, begin_s: float, steps_s: NDArray[np.floating[Any]]
    ) -> None:
        self.batch = batch
        self.num_context = num_context
        """Context tokens of the first step."""
        self.ends_s: list[float] = np.cumsum(np.concatenate(([begin_s], steps_s)))[1:].tolist()
        self.steps_s: list[float] = steps_s.tolist()
        self.num_done = 0


class Engine:
    """Commands in, events out. At once where nothing is computed, else between two steps."""

    def __init__(
        self,
        clock: Clock,
        times: StepTimes,
        pool: BlockPool,
        config: SchedulerConfig,
        host: EngineHost,
        noise: Noise,
        *,
        plans_ahead: bool = True,
        step_by_step: bool = False,
    ) -> None:
        """`plans_ahead`: a step is planned while the one before runs, as on a GPU. `step_by_step`: every step is
        planned by itself, which is slower and changes nothing."""
        self.pool = pool
        self.scheduler = Scheduler(pool, config, lambda: clock.now_s)
        self.times = times
        self.num_steps = 0
        self.busy_s = 0.0
        """Time of all steps so far."""
        self._clock, self._host, self._noise = clock, host, noise
        self._plans_ahead, self._step_by_step = plans_ahead, step_by_step
        self._is_paced = config.tpot_target_s > 0
        self._commands: deque[Command] = deque()
        self._is_waiting = True  # for a command
        self._batch: list[EngineSequence] = []  # that the last step computed and that did not end
        self._largest = 0  # number of sequences that a planned step decoded
        self._run: _DecodeRun | None = None
        self._leaving: list[str] = []  # once the run has ended
        self._ticket = 0  # of the next event that is due: older ones are void

    def submit(self, command: Command) -> None:
        """Runs a command that calls the scheduler, between two steps."""
        self._commands.append(command)
        if self._is_waiting:
            self._is_waiting = False
            self._take_commands()
            self._go_on(self._launch())
        elif self._run is not None and len(self._commands) == 1:
            # The step that runs now is the last of the run.
            num_steps = bisect_left(self._run.ends_s, self._clock.now_s) + 1
            self._wait(self._run.ends_s[num_steps - 1], self._end_run, self._run, num_steps)

    def abort(self, sequence_id: str) -> None:
        """Part of a command: the sequence gets no more tokens but that of a step that runs."""
        if self._run is not None:
            self._leaving.append(sequence_id)
            return
        self.scheduler.abort(sequence_id)
        self.scheduler.take_ended()
        self._batch = [sequence for sequence in self._batch if sequence.sequence_id != sequence_id]

    @property
    def is_decoding(self) -> bool:
        """Whether steps are done at once: no event tells of each."""
        return self._run is not None

    def settle(self) -> None:
        """Brings scheduler and pool up to date, for one who looks at them between two steps."""
        if self._run is not None:
            self._apply(self._run, bisect_right(self._run.ends_s, self._clock.now_s))

    # --- from step to step

    def _between(self) -> None:
        """A step has ended. The next one is planned before or after what came meanwhile is taken."""
        if self._plans_ahead:
            launched = self._launch()
            if self._commands:
                self._take_commands()
                launched = launched or self._launch()
        else:
            self._take_commands()
            launched = self._launch()
        self._go_on(launched)

    def _go_on(self, launched: bool) -> None:
        while not launched and self._commands:
            self._take_commands()
            launched = self._launch()
        self._is_waiting = not launched
        self._host.on_changed(self.pool.drain_events())

    def _take_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _launch(self) -> bool:
        """Begins the next step, or several; False where there is nothing to compute."""
        if self._begin_run():
            return True
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return False
        work = step_work(plan)
        self._largest = max(self._largest, work.num_sequences)
        step_s = self.times.step_s(work) * self._noise.of(self.num_steps)
        for sequence_id, num_cached in self.scheduler.take_started():
            self._host.on_started(sequence_id, num_cached)
        self._wait(self._clock.now_s + step_s, self._end_step, plan, step_s)
        return True

    def _wait(self, until_s: float, call: Callable[..., None], *args: object) -> None:
        self._ticket += 1
        self._clock.at(until_s, self._on_time, self._ticket, call, args)

    def _on_time(self, ticket: int, call: Callable[..., None], args: tuple[object, ...]) -> None:
        if ticket == self._ticket:
            call(*args)

    def _end_step(self, plan: StepPlan, step_s: float) -> None:
        self.num_steps += 1
        self.busy_s += step_s
        num_sampled = sum([len(item.samples) for item in plan.sequences])
        output = self.scheduler.apply(plan, StepResult((_TOKEN,) * num_sampled), step_s)
        find = self.scheduler.sequences.get
        self._batch = [s for item in plan.sequences if (s := find(item.sequence_id)) is not None]
        self._host.on_output(output)
        self.scheduler.take_ended()
        self._between()

    # --- steps in which nothing but decoding happens

    def _begin_run(self) -> bool:
        """Begins to do steps at once; False where the next step is another one than that behind it."""
        batch, scheduler = self._batch, self.scheduler
        if not batch or self._step_by_step or scheduler.sequences.num_waiting:
            return False
        work = scheduler.sequences.work
        decoding = work.decoding
        if work.num_queued_tokens or decoding.num_sequences != len(batch) or len(batch) > self._largest:
            return False
        room = (self.pool.num_free - len(batch)) * self.pool.block_size // len(batch)
        num_steps = min(MOST_STEPS, room, min([_num_left(sequence) for sequence in batch]))
        if self._commands:
            num_steps = min(num_steps, 1)
        if num_steps < 1:
            return False
        first_s = self.times.decode_step_s(len(batch), decoding.num_context_tokens)
        steps_s = first_s + np.arange(num_steps) * self.times.growth_s(len(batch))
        steps_s *= self._noise.of_many(self.num_steps, num_steps)
        self._run = _DecodeRun(batch, decoding.num_context_tokens, self._clock.now_s, steps_s)
        self._wait(self._run.ends_s[-1], self._end_run, self._run, num_steps)
        if self._commands:  # which may want blocks
            for sequence in batch:
                _grow(sequence, 1, self.pool)
        return True

    def _end_run(self, run: _DecodeRun, num_steps: int) -> None:
        self._apply(run, num_steps)
        self._run = None
        ended = [sequence for sequence in run.batch if _num_left(sequence) == 0]
        if ended:
            self._batch = [sequence for sequence in run.batch if _num_left(sequence) > 0]
            for sequence in ended:
                self.scheduler.abort(sequence.sequence_id)  # as where a step ends it
            self.scheduler.take_ended()
            tokens = [NewToken(sequence.sequence_id, _TOKEN, FinishReason.LENGTH) for sequence in ended]
            self._host.on_output(StepOutput(tuple(tokens)))
        while self._leaving:
            self.abort(self._leaving.pop())
        self._between()

    def _apply(self, run: _DecodeRun, num_steps: int) -> None:
        """What the scheduler does in the steps of the run up to that number, as far as it is not done yet."""
        count = num_steps - run.num_done
        if count <= 0:
            return
        for sequence in run.batch:
            _advance(sequence, count, self.pool)
        batch, fit = len(run.batch), self.scheduler.step_fit
        for number in range(run.num_done, num_steps):
            if self._is_paced:
                fit.times  # noqa: B018 - as at the beginning of a step: what is fitted depends on when that is asked
            self.scheduler.measured(StepWork(batch, run.num_context + number * batch), run.steps_s[number])
        self.busy_s += sum(run.steps_s[run.num_done : num_steps])
        self.num_steps += count
        run.num_done = num_steps


def _num_left(sequence: EngineSequence) -> int:
    """Tokens that it will still get."""
    return sequence.max_tokens_total - len(sequence.token_ids)


def _advance(sequence: EngineSequence, count: int, pool: BlockPool) -> None:
    """As many steps as `count` have given the sequence a token each."""
    block_size = pool.block_size
    _grow(sequence, count, pool)
    sealed = sequence.num_computed_tokens // block_size
    sequence.token_ids.extend([_TOKEN.token_id] * count)
    sequence.num_computed_tokens += count
    full = sequence.num_computed_tokens // block_size
    if full > sealed:
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, block_size)
        for index in range(sealed, full):
            pool.seal(sequence.block_ids[index], sequence.block_hashes[index])


def _grow(sequence: EngineSequence, count: int, pool: BlockPool) -> None:
    """Blocks for `count` more computed tokens."""
    missing = -(-(sequence.num_computed_tokens + count) // pool.block_size) - len(sequence.block_ids)
    if missing > 0:
        sequence.block_ids += pool.allocate(missing)
