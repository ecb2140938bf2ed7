"""Which running answers move to another decode worker, where to, and why. Pure policy: plain numbers, the time is an
argument."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from services.router.placement.views import WorkerView
from shared.sizing.step_time import StepTimes, StepWork

LOOK_EVERY_S = 0.2
"""Shortest time between two looks for what should move, seconds."""
MAX_REPEATED = 2
"""The next worker is not asked a second time where it has at most this many tokens to repeat."""
FIRST_GUESS_TOKENS = 64
"""An answer is expected to bring as many tokens again as it has, at least this many: nothing else is known of it."""
LEAST_LEFT_TOKENS = 32
"""An answer that is expected to end before it has this many more stays: the move would hardly be over."""
REST_S = 5.0
"""An answer does not move again before this time has passed since its last move began, seconds."""
STRAINED_S = 1.0
"""Seconds that a worker has to be too slow before it is relieved."""
RELIEF_S = 2.0
"""Seconds between two answers that leave a slow worker: its reports have to show what the last move changed."""
RESCUE_GAIN = 0.8
"""A rescue needs a worker whose step with the answer takes at most this share of the present one's."""


class MoveCause(Enum):
    """Why an answer moves; the values are the metrics' labels."""

    DRAIN = "drain"
    """Its worker drains, or is to be removed."""
    PREFERENCE = "preference"
    """Its worker is wanted for prompts."""
    RESCUE = "rescue"
    """Its worker is too slow for the target of time per token."""


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """Most moves at once."""

    per_worker: int = 2
    """From a worker and to it."""
    per_router: int = 8


@dataclass(frozen=True, slots=True)
class Desk:
    """A decode worker, as moves see it."""

    name: str
    work: StepWork
    """The next step of its running answers."""
    num_requests: int
    max_num_seqs: int
    num_free_blocks: int
    times: StepTimes | None = None
    """None: not measured."""
    least_slack_s: float | None = None
    """How far its tightest answer is ahead of the target; None without a target or answers."""
    accepting: bool = True
    """Takes new work."""
    leaving: MoveCause | None = None
    """Why all its answers are to go; None: they may stay."""

    @classmethod
    def of(cls, view: WorkerView, leaving: MoveCause | None, *, preferred: Set[str]) -> Desk:
        """By the router's view of the worker. `preferred`: workers to which answers may move; none of them: to all."""
        return cls(
            view.name,
            StepWork(view.num_decoding, view.num_context_tokens),
            view.num_requests,
            view.max_num_seqs,
            view.num_free_blocks,
            view.times,
            view.least_slack_s,
            view.accepting and (not preferred or view.name in preferred),
            leaving,
        )

    @property
    def step_s(self) -> float | None:
        """Its next step; None: not known."""
        return self.times.step_s(self.work) if self.times is not None else None

    def with_answer(self, num_tokens: int, num_blocks: int) -> Desk:
        """The worker with one more answer of that length."""
        sequences, context = self.work.num_sequences + 1, self.work.num_context_tokens + num_tokens
        return replace(
            self,
            work=StepWork(sequences, context),
            num_requests=self.num_requests + 1,
            num_free_blocks=self.num_free_blocks - num_blocks,
        )


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """An answer that could move."""

    request_id: str
    worker: str
    num_tokens: int
    """Prompt and output so far."""
    num_blocks: int
    """Blocks that hold these tokens and one more."""
    num_output_tokens: int
    max_left: int
    """Tokens until its limit."""
    rested_s: float = math.inf
    """Since its last move began; infinity: it has not moved."""

    @property
    def expected_left(self) -> int:
        """Tokens that are expected to come."""
        return min(self.max_left, max(self.num_output_tokens, FIRST_GUESS_TOKENS))


class ProposedMove(NamedTuple):
    """One answer to move."""

    request_id: str
    target: str
    cause: MoveCause


class MovePolicy:
    """Proposes moves from time to time, a few at once. Remembers since when workers have been too slow."""

    def __init__(self, limits: MoveLimits, tpot_target_s: float = 0.0, *, rescue: bool = True) -> None:
        """`tpot_target_s`: 0 = none, and then nothing is rescued."""
        self._limits = limits
        self._target_s = tpot_target_s
        self._rescue = rescue
        self._strained_since: dict[str, float] = {}
        self._relieved_at: dict[str, float] = {}

    def sources(self, desks: Iterable[Desk], now_s: float) -> Mapping[str, MoveCause]:
        """The workers that should lose answers, and why. To be called with all of them, each time before `choose`."""
        found: dict[str, MoveCause] = {}
        strained: dict[str, float] = {}
        for desk in desks:
            if desk.leaving is not None:
                found[desk.name] = desk.leaving
            elif self._is_strained(desk):
                since = strained[desk.name] = self._strained_since.get(desk.name, now_s)
                relieved = self._relieved_at.get(desk.name, -math.inf)
                if now_s - since >= STRAINED_S and now_s - relieved >= RELIEF_S:
                    found[desk.name] = MoveCause.RESCUE
        self._strained_since = strained
        self._relieved_at = {name: at for name, at in self._relieved_at.items() if now_s - at < RELIEF_S}
        return found

    def choose(
        self,
        sources: Mapping[str, MoveCause],
        desks: Sequence[Desk],
        answers: Iterable[RunningAnswer],
        under_way: Iterable[tuple[str, str]],
        now_s: float,
        num_groups: int,
    ) -> list[ProposedMove]:
        """The answers to move now. `answers`: those on the sources; `under_way`: source and target of each move that
        has not ended; `num_groups`: of the fleet's KV, of which each answer may soon take a block more. The answers
        that are expected to last longest go first, of each source."""
        known = {desk.name: desk for desk in desks}
        busy = Counter(name for pair in under_way for name in pair)
        room = self._limits.per_router - sum(busy.values()) // 2
        chosen: list[ProposedMove] = []
        for answer in sorted(answers, key=lambda answer: (-answer.expected_left, answer.request_id)):
            if len(chosen) >= room:
                break
            cause = sources.get(answer.worker)
            if cause is None or answer.worker not in known or busy[answer.worker] >= self._limits.per_worker:
                continue
            if answer.expected_left < LEAST_LEFT_TOKENS or answer.rested_s < REST_S:
                continue
            if cause is MoveCause.RESCUE and now_s - self._relieved_at.get(answer.worker, -math.inf) < RELIEF_S:
                continue
            target = self._target(answer, cause, known, busy, sources, num_groups)
            if target is None:
                continue
            if cause is MoveCause.RESCUE:
                self._relieved_at[answer.worker] = now_s
            busy[answer.worker] += 1
            busy[target.name] += 1
            known[target.name] = target
            chosen.append(ProposedMove(answer.request_id, target.name, cause))
        return chosen

    def _is_strained(self, desk: Desk) -> bool:
        """Whether its answers miss the target, or will."""
        if not self._target_s or not self._rescue or not desk.work.num_sequences:
            return False
        step_s = desk.step_s
        is_late = desk.least_slack_s is not None and desk.least_slack_s < 0
        return step_s is not None and (step_s > self._target_s or (is_late and desk.work.num_sequences > 1))

    def _target(
        self,
        answer: RunningAnswer,
        cause: MoveCause,
        desks: Mapping[str, Desk],
        busy: Mapping[str, int],
        sources: Mapping[str, MoveCause],
        num_groups: int,
    ) -> Desk | None:
        """The best worker for the answer, as it is with it; None where none is fit."""
        source_s = desks[answer.worker].step_s
        best: tuple[tuple[bool, float, int, str], Desk] | None = None
        for desk in desks.values():
            if desk.name == answer.worker or desk.name in sources or not desk.accepting:
                continue
            if busy.get(desk.name, 0) >= self._limits.per_worker or desk.num_requests >= desk.max_num_seqs:
                continue
            if answer.num_blocks + desk.num_requests * num_groups > desk.num_free_blocks:
                continue
            after = desk.with_answer(answer.num_tokens, answer.num_blocks)
            step_s = after.step_s
            is_slow = bool(self._target_s) and step_s is not None and step_s > self._target_s
            if cause is MoveCause.RESCUE and (is_slow or not _gains(step_s, source_s)):
                continue
            if cause is MoveCause.PREFERENCE and is_slow:
                continue
            rank = (is_slow, step_s if step_s is not None else math.inf, after.work.num_sequences, desk.name)
            if best is None or rank < best[0]:
                best = rank, after
        return best[1] if best is not None else None


def _gains(step_s: float | None, source_s: float | None) -> bool:
    """Whether the answer would be faster there; what is not measured promises nothing."""
    return step_s is not None and source_s is not None and step_s <= RESCUE_GAIN * source_s
