"""The steps of a worker that computes prompts beside running answers.

It bounds its steps by the target for TPOT (`shared/engine/scheduler/pacing.py`), so a prompt goes there in chunks of
what is left of each step, and in larger ones while its answers are ahead of the target; without answers it goes in the
largest that the worker takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shared.engine.scheduler.pacing import AIM, GAP_TARGETS, LEAST_CHUNK
from shared.sizing.step_time import StepTimes

DEFAULT_BUDGET = 2048
"""Tokens of a step where a worker does not say its own."""


class Pace(NamedTuple):
    """Pace of one worker, with the answers that run there or are to."""

    chunk_tokens: float
    """Tokens of prompts in one step."""
    step_s: float
    """Time of a step with such a chunk."""
    decode_s: float
    """Time of a step without a chunk; 0 where no answer runs."""

    @property
    def tokens_a_second(self) -> float:
        """Tokens of prompts that it computes a second."""
        return self.chunk_tokens / self.step_s

    def seconds(self, num_tokens: float) -> float:
        """To compute that many tokens of prompts; a step's time at least."""
        return max(1.0, num_tokens / self.chunk_tokens) * self.step_s


class Beside:
    """The steps of a worker beside its answers, whatever prompts it computes: made once for many of these."""

    __slots__ = (
        "_attention_s",
        "_bounds",
        "_exposed",
        "_most",
        "_num_answers",
        "_own_s",
        "_rated",
        "_read_s",
        "_token_s",
        "decode_s",
    )

    def __init__(
        self, times: StepTimes, num_answers: float, num_context_tokens: float, target_s: float, budget: float
    ) -> None:
        """See `pace_of`."""
        self._num_answers, self._most = num_answers, max(1.0, budget - num_answers)
        self._own_s = times.fixed_s + num_answers * times.sequence_s + num_context_tokens * times.kv_s
        self._attention_s, self._read_s, self._token_s = times.attention_s, times.read_s, times.token_s
        self._exposed = 1 - times.overlap
        self.decode_s = self._own_s + times.hidden_s(times.read_s, num_answers * times.token_s) if num_answers else 0.0
        """Time of a step without prompts, seconds; 0 where no answer runs."""
        self._rated = math.nan, 0.0  # pairs a token of the newest `rate`, and that
        self._bounds: tuple[tuple[float, float], ...] = ()
        if num_answers and target_s < math.inf:
            late = self.decode_s > target_s  # even without prompts
            limit_s = GAP_TARGETS * self.decode_s if late else AIM * target_s
            left_s = limit_s - self._own_s
            (read_s, token_s), (other_read_s, other_token_s) = times.lines
            self._bounds = (
                (left_s - read_s - num_answers * token_s, token_s),
                (left_s - other_read_s - num_answers * other_token_s, other_token_s),
            )

    def pace(self, pairs_a_token: float, num_tokens: float = math.inf) -> Pace:
        """The largest chunk whose step the answers bear."""
        return Pace(*self._step(pairs_a_token, num_tokens), self.decode_s)

    def seconds(self, pairs_a_token: float, num_tokens: float) -> float:
        """To compute prompts of that many tokens in all at that pace; a step's time at least."""
        chunk, step_s = self._step(pairs_a_token, num_tokens)
        return num_tokens / chunk * step_s if num_tokens > chunk else step_s

    def rate(self, pairs_a_token: float) -> float:
        """Tokens of prompts a second at that pace, of as many prompts as there may be."""
        if pairs_a_token != self._rated[0]:  # a queue is looked at by many requests between two of its reports
            chunk, step_s = self._step(pairs_a_token, math.inf)
            self._rated = pairs_a_token, chunk / step_s
        return self._rated[1]

    def _step(self, pairs_a_token: float, num_tokens: float) -> tuple[float, float]:
        """The largest chunk and its step, which is within both of `StepTimes.lines`. Written out: a request asks for
        some hundred of them."""
        attention_s = pairs_a_token * self._attention_s
        chunk = num_tokens if num_tokens < self._most else self._most
        if self._bounds:
            least = math.inf
            for left_s, token_s in self._bounds:
                a_token_s = token_s + attention_s
                if a_token_s > 0:
                    room = left_s / a_token_s
                    if room < least:
                        least = room
                elif left_s < 0:
                    least = 0.0
            if least < chunk:
                chunk = max(least, min(chunk, LEAST_CHUNK))
        read_s, products_s = self._read_s, (self._num_answers + chunk) * self._token_s
        longer_s, shorter_s = (read_s, products_s) if read_s > products_s else (products_s, read_s)
        return chunk, self._own_s + chunk * attention_s + (longer_s + self._exposed * shorter_s)


def pace_of(
    times: StepTimes,
    num_answers: float,
    num_context_tokens: float,
    pairs_a_token: float,
    target_s: float,
    budget: float,
    num_tokens: float = math.inf,
) -> Pace:
    """The pace at which a worker computes prompts of `num_tokens` in all, each token of which attends to
    `pairs_a_token`, beside answers whose target for TPOT is `target_s` (infinite: none)."""
    return Beside(times, num_answers, num_context_tokens, target_s, budget).pace(pairs_a_token, num_tokens)


class Known(NamedTuple):
    """What a view's own answers leave of its worker's steps, kept in `WorkerView.known` until what it depends on has
    changed: by a report, by a request that was placed there, or, where the worker has measured nothing, by `times`."""

    times: StepTimes
    target_s: float
    fields: tuple[int, int, int, int, int]
    steady: Beside
    """By the target."""
    burst: Beside
    """While its answers are ahead of the target."""
