"""How long the next step may take beside running answers. Pure policy, part of the scheduler.

An answer is due a token every `AIM` · `tpot_target_s` from its first one on. Steps that are quicker put it ahead of
that: it has slack, which a later step may spend for a larger chunk of a prompt. A step spends a part of the least
slack, so that several in a row can, and takes no longer than the greatest gap between two tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shared.engine.sequence import EngineSequence, Goal
from shared.sizing.step_time import StepTimes, StepWork

AIM = 0.95
"""Of the target, what is aimed at: clients measure from the first token, wherever that was computed, and steps are
predicted with errors. An answer kept at the target itself would miss it as often as not."""
HEAD_START = 2.0
"""Targets that an answer is ahead by at its beginning. Without them each new one would stop the chunks: the step behind
its first token is planned already, so its second token comes two steps later …"""
CATCH_UP = 24
"""… and tokens within which it gives them back."""
SPENT_SHARE = 0.5
"""Of the least slack, what one step may spend."""
LEAST_SHARE = 0.5
"""Of the target, what a step may take beside answers that are late: quicker steps let them catch up, and chunks that
became ever smaller would not."""
GAP_TARGETS = 3.0
"""The greatest gap where none is set, in targets."""
LEAST_CHUNK = 16
"""Tokens that one prompt of each step may compute whatever the answers bear: no prompt stands still."""


class Pacing:
    """Bounds the chunks beside running answers by the time of the step, as far as it can be predicted."""

    def __init__(self, tpot_target_s: float, greatest_gap_s: float = 0.0) -> None:
        """Seconds between two tokens of an answer, in the mean and at most; 0: no target, and GAP_TARGETS of it."""
        self.tpot_target_s = tpot_target_s
        self._due_s = AIM * tpot_target_s
        self.greatest_gap_s = max(tpot_target_s, greatest_gap_s) if greatest_gap_s else GAP_TARGETS * tpot_target_s

    def began(self, sequence: EngineSequence, now_s: float) -> None:
        """An answer has its first token here, or continues after it had lost its blocks: it is in time from now on."""
        sequence.paced_from_s = now_s
        sequence.num_unpaced_tokens = sequence.num_output_tokens

    def slack_s(self, sequence: EngineSequence, at_s: float, num_more: int = 0) -> float:
        """How far an answer is ahead of its target at that time, with `num_more` tokens besides those it has."""
        assert sequence.paced_from_s is not None
        num_tokens = sequence.num_output_tokens - sequence.num_unpaced_tokens + num_more
        ahead_s = HEAD_START * self.tpot_target_s * max(0.0, 1.0 - num_tokens / CATCH_UP)
        return sequence.paced_from_s + num_tokens * self._due_s + ahead_s - at_s

    def least_slack_s(self, sequences: Iterable[EngineSequence], now_s: float) -> float | None:
        """Of all running answers; None without any, or without a target."""
        if self.tpot_target_s == 0:
            return None
        found = [self.slack_s(sequence, now_s) for sequence in sequences if is_answer(sequence)]
        return min(found, default=None)

    def step_limit_s(self, answers: Iterable[EngineSequence], begin_s: float) -> float:
        """The longest that a step which begins then may take beside these answers; infinite without answers."""
        if self.tpot_target_s == 0:
            return math.inf
        slacks = [self.slack_s(s, begin_s, s.num_in_flight_samples) for s in answers if is_answer(s)]
        if not slacks:
            return math.inf
        least = min(slacks)
        spent = SPENT_SHARE * least if least > 0 else least
        return min(self.greatest_gap_s, max(LEAST_SHARE * self.tpot_target_s, self._due_s + spent))


class StepRoom:
    """What is left of a step's time while its chunks are chosen, one prompt after the other."""

    def __init__(self, times: StepTimes | None, limit_s: float, work: StepWork) -> None:
        """`work` is what the step computes already; without `times` or a limit any chunk has room."""
        self._times = times if limit_s < math.inf else None
        self._limit_s = limit_s
        self.work = work

    @property
    def is_full(self) -> bool:
        """Whether no further prompt has room for a token."""
        return self._times is not None and self.work.num_chunks > 0 and not self._within(0, 1)

    def most(self, num_before: int, count: int) -> int:
        """Of `count` tokens of a prompt behind its first `num_before`, those that have room; of the step's first prompt
        at least LEAST_CHUNK."""
        if self._times is None:
            return count
        least = 0 if self.work.num_chunks else min(count, LEAST_CHUNK)
        return max(least, self._within(num_before, count))

    def take(self, num_before: int, count: int) -> None:
        """The step computes them."""
        self.work = self.work.with_chunk(count, num_before)

    def predicted_s(self) -> float:
        """Of the step as it is; 0 where nothing is known."""
        return self._times.step_s(self.work) if self._times is not None else 0.0

    def _within(self, num_before: int, count: int) -> int:
        assert self._times is not None
        return self._times.largest_chunk(self.work, num_before, self._limit_s, count)


def is_answer(sequence: EngineSequence) -> bool:
    """Whether a client reads its tokens from this worker already."""
    return sequence.goal is Goal.COMPLETION and sequence.paced_from_s is not None
