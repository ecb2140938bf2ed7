"""A device of another speed: steps take the time that a model of their duration gives, and compute nothing.

Everything around the step is real: the scheduler, the KV pool, its hand-offs and the router. Thus many workers
fit on a few cores, and a machine without a GPU shows how a fleet of GPUs behaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.engine.plan import NoToken, SampledToken, SampleSpec, StepPlan, StepResult, step_work
from shared.engine.runner.block_access import BlockAccess
from shared.kernels.lora.step import PackedAdapter
from shared.sizing.step_time import StepTimes


class PoolOwner(Protocol):
    """The runner whose KV pool a timed one uses."""

    @property
    def blocks(self) -> BlockAccess:
        """The pool as the transfer plane sees it."""

    def checksums(self, block_ids: list[int]) -> list[int]:
        """Checksums of these blocks."""


@dataclass(frozen=True, slots=True)
class _TimedStep:
    ends_at: float
    outcome: StepResult
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def result(self) -> StepResult:
        """Waits until the step would be done."""
        while (left := self.ends_at - self.clock()) > 0:
            self.sleep(left)
        return self.outcome


class TimedRunner:
    """A `StepRunner`. As on a GPU, a step may be launched while the one before runs; it begins when that one ends."""

    def __init__(
        self,
        pool: PoolOwner,
        times: StepTimes,
        answer: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`answer`: token ids; a sequence's token at position p is the one at p, modulo their number. So an answer
        that continues on another worker continues alike. `clock` and `sleep` are in seconds."""
        self._pool = pool
        self._times = times
        self._answer = tuple(answer)
        self._clock, self._sleep = clock, sleep
        self._ends_at = 0.0  # of the step launched last

    @property
    def is_async(self) -> bool:
        """See `StepRunner`."""
        return True

    @property
    def blocks(self) -> BlockAccess:
        """See `StepRunner`; no step writes to them."""
        return self._pool.blocks

    def checksums(self, block_ids: list[int]) -> list[int]:
        """See `StepRunner`."""
        return self._pool.checksums(block_ids)

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """See `StepRunner`; nothing is computed, so nothing is added to it."""

    def launch(self, plan: StepPlan) -> _TimedStep:
        """See `StepRunner`. Copies of blocks take no time."""
        begins_at = max(self._clock(), self._ends_at)
        self._ends_at = begins_at + self._times.step_s(step_work(plan))
        sampled = tuple(self._token(spec) for item in plan.sequences for spec in item.samples)
        targets = tuple(
            tuple(SampledToken(token, 0.0) for token in item.targets) for item in plan.sequences if item.targets
        )
        return _TimedStep(self._ends_at, StepResult(sampled, targets), self._clock, self._sleep)

    def _token(self, spec: SampleSpec) -> SampledToken | NoToken:
        if spec.params.structured_output is not None:
            return NoToken(structure="a timed device computes no logits")
        logprob = 0.0 if spec.params.logprobs is not None else None
        return SampledToken(self._answer[spec.position % len(self._answer)], logprob)
