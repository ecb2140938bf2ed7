"""What a worker's next steps take, by its own model of step times: to the first token of a prompt that goes there, and
between the tokens of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.router.placement.beside import DEFAULT_BUDGET, Beside, Known, pace_of
from services.router.placement.prediction import filled_level
from services.router.placement.views import Work, WorkerView
from shared.engine.scheduler.pacing import AIM, GAP_TARGETS
from shared.sizing.step_time import StepTimes, StepWork


def _known(view: WorkerView, times: StepTimes, target_s: float) -> Known:
    fields = (
        view.num_decoding, view.num_context_tokens, view.num_promised, view.num_promised_tokens, view.max_step_tokens,
    )  # fmt: skip
    known = view.known
    if known is None or known.times is not times or known.fields != fields or known.target_s != target_s:
        view.known = known = _look(view, times, target_s, fields)
    return known


def _look(
    view: WorkerView,
    times: StepTimes,
    target_s: float,
    fields: tuple[int, int, int, int, int],
    num_more: int = 0,
    num_more_tokens: int = 0,
) -> Known:
    """With further answers besides: of these and of those that are promised half run, as they begin one by one."""
    num_late, late_tokens = view.num_promised + num_more, view.num_promised_tokens + num_more_tokens
    num_running = view.num_decoding - view.num_promised
    beside = num_running + num_late / 2, view.num_context_tokens - view.num_promised_tokens + late_tokens / 2
    budget = view.max_step_tokens or DEFAULT_BUDGET
    return Known(
        times,
        target_s,
        fields,
        Beside(times, *beside, target_s, budget),
        Beside(times, *beside, GAP_TARGETS / AIM * target_s, budget),
    )


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
    if num_new_answers:
        known = _look(view, times, target_s, (0, 0, 0, 0, 0), num_new_answers, context_tokens)
    else:
        known = _known(view, times, target_s)
    num_queued = view.num_queued_tokens
    num_tokens, num_pairs = num_queued + own.tokens, view.num_queued_pairs + own.pairs
    seconds = _to_compute(view, known, num_tokens, num_pairs)
    if not num_queued or now_s <= view.reported_s:
        return seconds
    pace = known.steady.pace(num_pairs / num_tokens, num_tokens)
    return seconds - min(now_s - view.reported_s, pace.step_s, num_queued / pace.tokens_a_second)


def own_s(view: WorkerView, times: StepTimes, own: Work, target_s: float) -> float:
    """Seconds in which the worker would compute `own` beside its answers if nothing were queued there."""
    return _to_compute(view, _known(view, times, target_s), own.tokens, own.pairs)


def _to_compute(view: WorkerView, known: Known, num_tokens: int, num_pairs: float) -> float:
    """Seconds: first while its answers are ahead of their target, then at the steady pace."""
    pairs_a_token, target_s, slack_s = num_pairs / num_tokens, known.target_s, view.least_slack_s or 0.0
    if slack_s <= 0 or not known.steady.decode_s <= target_s < math.inf or view.num_decoding <= view.num_promised:
        return known.steady.seconds(pairs_a_token, num_tokens)
    burst = known.burst.pace(pairs_a_token, num_tokens)
    spent_s = burst.step_s - AIM * target_s
    in_burst = burst.chunk_tokens * slack_s / spent_s if spent_s > 0 else math.inf
    if num_tokens <= in_burst:
        return burst.seconds(num_tokens)
    pace = known.steady.pace(pairs_a_token, num_tokens)
    return in_burst / burst.tokens_a_second + (num_tokens - in_burst) / pace.tokens_a_second


def _queued_s(view: WorkerView, times: StepTimes, target_s: float) -> float:
    """Seconds until the worker has computed the prompts that are queued there now, beside its answers."""
    return own_s(view, times, view.queued, target_s) if view.num_queued_tokens else 0.0


def busy_step_s(
    view: WorkerView, times: StepTimes, step_s: float, in_s: float, target_s: float, life_s: float
) -> float:
    """A step of an answer that joins others there `in_s` from now and lasts `life_s`, in the mean, where it takes
    `step_s` beside answers alone: while prompts are queued steps are as long as the target allows."""
    left_s = _queued_s(view, times, target_s) - in_s
    if left_s <= 0 or target_s == math.inf:
        return step_s
    return step_s + min(1.0, left_s / life_s) * max(0.0, AIM * target_s - step_s)


def joins_in_s(view: WorkerView, times: StepTimes, in_s: float, target_s: float) -> float:
    """For how long an answer that comes there `in_s` from now waits for the step that runs then: without answers steps
    of a long prompt are as large as they may be."""
    if view.num_decoding > view.num_promised or _queued_s(view, times, target_s) <= in_s:
        return 0.0
    queued = view.queued
    budget = view.max_step_tokens or DEFAULT_BUDGET
    return pace_of(times, 0, 0, queued.pairs / queued.tokens, math.inf, budget, queued.tokens).step_s


def prompt_rate(view: WorkerView, times: StepTimes, target_s: float, pairs_a_token: float = 0.0) -> float:
    """Tokens of prompts a second that the worker computes of its queue, or where that is empty, of prompts whose tokens
    attend to `pairs_a_token` tokens each."""
    pairs = view.num_queued_pairs / view.num_queued_tokens if view.num_queued_tokens else pairs_a_token
    return _known(view, times, target_s).steady.rate(pairs)


def steady_rate(
    times: StepTimes,
    pairs_a_token: float,
    target_s: float,
    budget: float,
    prompt_tokens: float,
    output_len: float,
    context_len: float,
) -> float:
    """Tokens of prompts a second that a worker keeps computing where each `prompt_tokens` of them are followed by an
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


def filled_s(num_tokens: float, drawn: Sequence[tuple[WorkerView, float]], rates: Sequence[float]) -> float:
    """Seconds until some worker has computed its queue and its share of `num_tokens` tokens, at these rates, of which
    one is above 0 at least. `drawn`: workers, each with the number of those for which it stands."""
    waits = [
        (view.num_queued_tokens / rate, number * rate)
        for (view, number), rate in zip(drawn, rates, strict=True)
        if rate > 0
    ]
    return filled_level(num_tokens, waits)


def as_answers_end(now_s: float, steady_s: float, life_s: float) -> float:
    """Seconds of what takes `now_s` beside the answers that run at this moment, and `steady_s` beside as many as stay
    running: after `life_s`, when those of this moment have ended, the rest of it is computed at that pace."""
    return now_s if now_s <= life_s else min(now_s, life_s + (1 - life_s / now_s) * steady_s)
