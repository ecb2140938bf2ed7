"""What a worker's next steps take, by its own model of step times: to the first token of a prompt that goes there, and
between the tokens of an answer.

Beside running answers a worker bounds its steps by the target for TPOT (`shared/engine/scheduler/pacing.py`), so a
prompt goes there in chunks of what is left of each step, and in larger ones while its answers are ahead of the target;
without answers it goes in the largest that the worker takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from services.router.placement.views import Work, WorkerView
from shared.engine.scheduler.pacing import AIM, GAP_TARGETS, LEAST_CHUNK
from shared.sizing.step_time import StepTimes, StepWork

DEFAULT_BUDGET = 2048
"""Tokens of a step where a worker does not say its own."""


class Pace(NamedTuple):
    """Of one worker, with the answers that run there or are to."""

    chunk_tokens: float
    """Of prompts in one step."""
    step_s: float
    """Of a step with such a chunk."""
    decode_s: float
    """Of a step without; 0 where no answer runs."""

    @property
    def tokens_a_second(self) -> float:
        """Of prompts."""
        return self.chunk_tokens / self.step_s

    def seconds(self, num_tokens: float) -> float:
        """To compute that many tokens of prompts; a step's time at least."""
        return max(1.0, num_tokens / self.chunk_tokens) * self.step_s


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
    own_s = times.fixed_s + num_answers * times.sequence_s + num_context_tokens * times.kv_s
    attention_s = pairs_a_token * times.attention_s

    def step_s(chunk: float) -> float:
        products_s = (num_answers + chunk) * times.token_s
        return own_s + chunk * attention_s + times.hidden_s(times.read_s, products_s)

    decode_s = step_s(0.0) if num_answers else 0.0
    chunk = min(num_tokens, max(1.0, budget - num_answers))
    if num_answers and target_s < math.inf:
        limit_s = AIM * target_s if decode_s <= target_s else GAP_TARGETS * decode_s  # late even without prompts
        chunk = max(min(chunk, LEAST_CHUNK), min(chunk, _largest(times, own_s, num_answers, attention_s, limit_s)))
    return Pace(chunk, step_s(chunk), decode_s)


def _largest(times: StepTimes, own_s: float, num_answers: float, attention_s: float, limit_s: float) -> float:
    """The chunk whose step takes `limit_s`; see `StepTimes.lines`."""
    least = math.inf
    for read_s, token_s in times.lines:
        a_token_s = token_s + attention_s
        left_s = limit_s - own_s - read_s - num_answers * token_s
        if a_token_s > 0:
            least = min(least, left_s / a_token_s)
        elif left_s < 0:
            least = 0.0
    return least


def ttft_s(
    view: WorkerView,
    times: StepTimes,
    own: Work,
    target_s: float,
    now_s: float,
    num_new_answers: int = 0,
    context_tokens: int = 0,
) -> float:
    """Seconds from now until the worker, whose steps take `times`, has computed its queue and then `own`, beside its
    answers and as many new ones. It reports between steps: what has passed since is a part of the next one, done."""
    work = Work(view.num_queued_tokens + own.tokens, view.num_queued_pairs + own.pairs)
    beside = _beside(view, num_new_answers, context_tokens)
    seconds, pace = _to_compute(view, times, work, beside, target_s)
    queue_s = view.num_queued_tokens / pace.tokens_a_second
    return seconds - min(max(0.0, now_s - view.reported_s), pace.step_s, queue_s)


def own_s(view: WorkerView, times: StepTimes, own: Work, target_s: float) -> float:
    """Seconds in which the worker would compute `own` beside its answers if nothing were queued there."""
    seconds, _ = _to_compute(view, times, own, _beside(view), target_s)
    return seconds


def _to_compute(
    view: WorkerView, times: StepTimes, work: Work, beside: tuple[float, float], target_s: float
) -> tuple[float, Pace]:
    """(seconds, the pace once nothing is left of what the answers are ahead of their target)."""

    def at(within_s: float) -> Pace:
        budget = view.max_step_tokens or DEFAULT_BUDGET
        return pace_of(times, *beside, work.pairs / work.tokens, within_s, budget, work.tokens)

    pace, slack_s = at(target_s), view.least_slack_s or 0.0
    if view.num_decoding > view.num_promised and slack_s > 0 and pace.decode_s <= target_s < math.inf:
        burst = at(GAP_TARGETS / AIM * target_s)
        spent_s = burst.step_s - AIM * target_s
        in_burst = burst.chunk_tokens * slack_s / spent_s if spent_s > 0 else math.inf
        if work.tokens <= in_burst:
            return burst.seconds(work.tokens), pace
        return in_burst / burst.tokens_a_second + (work.tokens - in_burst) / pace.tokens_a_second, pace
    return pace.seconds(work.tokens), pace


def prompt_rate(view: WorkerView, times: StepTimes, target_s: float, pairs_a_token: float = 0.0) -> float:
    """Tokens of prompts a second that the worker computes of its queue, or where that is empty, of prompts whose tokens
    attend to so many."""
    pairs = view.num_queued_pairs / view.num_queued_tokens if view.num_queued_tokens else pairs_a_token
    budget = view.max_step_tokens or DEFAULT_BUDGET
    pace = pace_of(times, *_beside(view), pairs, target_s, budget)
    return pace.tokens_a_second


def steady_rate(
    times: StepTimes,
    pairs_a_token: float,
    target_s: float,
    budget: float,
    prompt_tokens: float,
    output_len: float,
    context_len: float,
) -> float:
    """Tokens of prompts a second that a worker goes on computing where each `prompt_tokens` of them are followed by an
    answer there, of `output_len` tokens and that context: beside as many answers as that rate keeps running. 0 where
    steps of one answer take longer than the target."""
    life_s = output_len * AIM * target_s

    def left(rate: float) -> float:
        num_answers = rate / prompt_tokens * life_s
        beside = num_answers, num_answers * context_len
        pace = pace_of(times, *beside, pairs_a_token, target_s, budget, budget)
        return pace.tokens_a_second - rate if pace.decode_s <= target_s else -math.inf  # that many are not taken

    low, high = 0.0, pace_of(times, 0, 0, pairs_a_token, math.inf, budget, budget).tokens_a_second
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) >= 0 else (low, middle)
    return low


def _beside(view: WorkerView, num_more: int = 0, num_more_tokens: float = 0) -> tuple[float, float]:
    """(answers, their tokens) beside which the worker computes its queue, in the mean: those that run, and of those
    that are to, and of `num_more`, half: they begin one after the other."""
    num_late, late_tokens = view.num_promised + num_more, view.num_promised_tokens + num_more_tokens
    num_running = view.num_decoding - view.num_promised
    return num_running + num_late / 2, view.num_context_tokens - view.num_promised_tokens + late_tokens / 2


def tpot_s(
    view: WorkerView, times: StepTimes, num_more: int, num_tokens: float, in_s: float = 0.0, life_s: float = math.inf
) -> float:
    """Seconds of a step of the worker's answers and `num_more` with `num_tokens` tokens besides, `in_s` from now, where
    answers run for `life_s`: of those that run now some have ended, of those that are to some too."""
    running = max(0.0, 1.0 - in_s / life_s)
    promised = min(1.0, life_s / in_s) if in_s > 0 else 1.0
    batch = (view.num_decoding - view.num_promised) * running + view.num_promised * promised + num_more
    context = (view.num_context_tokens - view.num_promised_tokens) * running + view.num_promised_tokens * promised
    return times.step_s(StepWork(batch, context + num_tokens)) if batch else 0.0  # type: ignore[arg-type]
