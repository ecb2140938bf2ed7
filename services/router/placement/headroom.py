"""What a split of one pool can serve: how many times the demand, and which of the requests, by the steps' coefficients.

By the target for TPOT a worker that decodes has room for some answers, and what is left of each step computes chunks of
prompts; a worker that does not decode computes prompts at its full pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from services.router.placement.beside import DEFAULT_BUDGET, Beside, Pace, pace_of
from services.router.placement.demand import Demand, Mix
from services.router.placement.views import WorkerView
from shared.engine.scheduler.pacing import AIM, GAP_TARGETS
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepTimes

PURE = 0.1
"""Of the prompts that workers compute which do not decode: where the others could compute fewer beside the answers that
there are, they compute none."""
UNLIKE = 1.6
"""Workers whose prompts take this many times as long as the next quicker one's are of another hardware."""
LEAST_S = 1e-9
"""Least time of a step: by a fit it may take none."""
FULL = 0.9
"""Share of a worker's blocks that answers may hold by the forecast."""
USED = 0.8
"""Share of their time that workers are used at the most where first tokens are to be in time: with more, prompts wait
for each other too long, for bursts are above the mean."""


class Kind(NamedTuple):
    """Workers of one hardware, by what they can do at some mix of requests."""

    names: tuple[str, ...]
    """Workers in the order in which they are to decode."""
    times: StepTimes
    """Step times as the workers that decode know them."""
    prompt_times: StepTimes
    """Step times as the other workers know them: a worker's fit is poor for steps that it has not run for long."""
    num_tokens: float
    """Tokens of which the answers' KV fits into a worker's blocks."""
    max_num_seqs: int
    budget: float
    prompt_rate: float = 0.0
    """Tokens of prompts a second, with no answers."""
    most_answers: float = 0.0
    """Most answers that the target for TPOT and the blocks allow."""

    def at(self, mix: Mix, step_s: float) -> Kind:
        """The same workers with this mix, where steps beside answers may take that long."""
        room = self.num_tokens / (mix.context_len + mix.output_len / 2)
        most = min(_most_answers(self.times, mix.context_len, step_s), room, self.max_num_seqs)
        rate = _prompt_rate(self.prompt_times, mix, self.budget)
        return self._replace(prompt_rate=rate, most_answers=max(0.0, most))


class Headroom:
    """Judges splits by what the targets of every request leave."""

    def __init__(self, tpot_target_s: float, ttft_target_s: float, *, apart: bool = False) -> None:
        """With `apart` workers that decode compute no prompts: two pools."""
        self._tpot_s, self._ttft_s, self._apart = tpot_target_s, ttft_target_s, apart
        self._step_s = AIM * tpot_target_s  # of workers that decode, with and without chunks: neither gets the rest
        self.gap_s = 0.0
        """Seconds from a first token that was computed elsewhere to the second one, which a hand-off takes of the
        target for TPOT."""
        self.hand_off_s = 0.0
        """Seconds that a hand-off's messages take of the target for TTFT."""

    def answers(self, mix: Mix) -> float:
        """Answers that run at a time, with steps as long as they may be."""
        return max(1e-9, mix.rate * mix.output_len * self._step_s)

    def room(self, kinds: Sequence[Kind], count: int, answers: float, mix: Mix) -> float:
        """The largest factor of the demand at which prompts and answers both have room."""
        shares = shares_of(kinds, count)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        if room <= 0:
            return 0.0
        pure, tokens_s = sum(rest * kind.prompt_rate for kind, _, rest in shares), mix.tokens_s
        turned = self._turned_over(shares, pure, answers, mix)
        most = room / answers
        if pure + self._beside(shares, 1.0, mix) >= most * tokens_s:
            return max(most, turned)

        def serves(factor: float) -> bool:
            return pure + self._beside(shares, factor / most, mix) >= factor * tokens_s

        return max(_largest(serves, most), turned)

    def in_time(self, kinds: Sequence[Kind], count: int, room: float, used: float, answers: float, mix: Mix) -> float:
        """The share of the requests whose first token is in time where the workers are used for that share of their
        time, and `room` is the demand's factor that uses all of it. The longest prompts are computed by workers that
        do not decode, as far as these have room; those that are late on any worker speak for no split and count as in
        time."""
        if self._ttft_s == math.inf or room <= 0:
            return 1.0
        shares = shares_of(kinds, count)
        load = min(1.0, used * room * answers / sum(num * kind.most_answers for kind, num, _ in shares))
        beside = [(self._burst(kind, load * kind.most_answers, mix), num) for kind, num, _ in shares if num]
        apart = [(kind.prompt_rate, rest) for kind, _, rest in shares if rest]
        part = min(1.0, sum(rate * num for rate, num in apart) / (room * mix.tokens_s))
        shorter, longer = mix.cut(self._ttft_s * max(kind.prompt_rate for kind in kinds), part)
        late = num_late(longer, apart, used, self._ttft_s) + num_late(shorter, beside, used, self._ttft_s)
        return 1.0 - late / len(mix.lens)

    def _burst(self, kind: Kind, num_answers: float, mix: Mix) -> float:
        """How many tokens of a prompt a worker computes a second beside `num_answers` answers that have time to spare:
        its steps may be longer than their target for TPOT. 0 where a step takes longer than the target for TTFT."""
        burst = self._pace(kind, num_answers, mix, GAP_TARGETS / AIM * self._tpot_s)
        return burst.tokens_a_second if burst.step_s <= self._ttft_s else 0.0

    def _turned_over(self, shares: Sequence[tuple[Kind, int, int]], pure: float, answers: float, mix: Mix) -> float:
        """How many times the demand is served by workers with as many answers as they may have, in steps shorter than
        the target's: where blocks or `max_num_seqs` leave room for fewer answers than the target does, these end
        sooner than it allows. `pure` tokens of prompts a second are computed by others."""
        answers_s, pairs = answers / self._step_s, mix.prompt.pairs / mix.prompt.tokens
        decoding = [(kind, num, kind.most_answers) for kind, num, _ in shares if num and kind.most_answers]
        full = [
            (num * most, Beside(kind.times, most, most * mix.context_len, math.inf, kind.budget), most)
            for kind, num, most in decoding
        ]

        def serves(factor: float) -> bool:
            # Tokens of prompts that these workers compute for each token of an answer.
            beside = max(0.0, factor * mix.tokens_s - pure) / (factor * answers_s)
            if beside and self._apart:
                return False
            made = 0.0
            for number, steps, most in full:
                pace = steps.pace(pairs, most * beside)
                if pace.step_s > self._step_s or pace.chunk_tokens < most * beside:
                    return False
                made += number / pace.step_s
            return made >= factor * answers_s

        return _largest(serves, sum(number / steps.decode_s for number, steps, _ in full) / answers_s)

    def left_by_hand_off(self, count: int, size: int, mix: Mix) -> float:
        """The share of both targets that is left to the steps of a request that is handed over; 1 where all do both."""
        if count >= size:
            return 1.0
        of_answer = 1.0 - self.gap_s / max(1.0, mix.output_len - 1.0) / self._tpot_s
        of_prompt = 1.0 - self.hand_off_s / self._ttft_s if self.hand_off_s else 1.0
        return max(0.0, of_answer) * max(0.0, of_prompt)

    def long_enough(self, kinds: Sequence[Kind], count: int, mix: Mix, demand: Demand) -> float:
        """The share of the answers with tokens enough to make up for the gap behind the first one, by steps as they are
        with that many answers, or as long as chunks make them where prompts are computed beside: the others are late
        wherever they are handed over. 1 where all do both."""
        shares = shares_of(kinds, count)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        if not any(rest for _, _, rest in shares) or room <= 0:
            return 1.0
        is_pure = self.is_pure(shares, mix.rate, mix)
        load = min(1.0, self.answers(mix) / room)
        paces = [self._pace(kind, load * kind.most_answers, mix, self._tpot_s) for kind, num, _ in shares if num]
        step_s = max(pace.decode_s if is_pure else pace.step_s for pace in paces)
        if self.gap_s <= step_s:
            return 1.0
        return demand.share_with_gaps((self.gap_s - step_s) / max(self._tpot_s - step_s, 1e-9))

    def _beside(self, shares: Sequence[tuple[Kind, int, int]], load: float, mix: Mix) -> float:
        """Tokens of prompts a second beside answers, each worker holding that share of the answers it may."""
        if self._apart:
            return 0.0
        total = 0.0
        for kind, num, _ in shares:
            if not num:
                continue
            pace = self._pace(kind, load * kind.most_answers, mix, self._tpot_s)
            if pace.step_s <= self._tpot_s:
                total += num * pace.tokens_a_second
        return total

    def is_pure(
        self, shares: Sequence[tuple[Kind, int, int]], rate: float, mix: Mix, most_answers: float = math.inf
    ) -> bool:
        """Whether prompts beside answers could be hardly any of all at that rate of requests, or beside as many answers
        as there are; or where a mean one could not be in time."""
        pure = sum(rest * kind.prompt_rate for kind, _, rest in shares)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        answers = max(1.0, min(most_answers, rate * mix.output_len * self._step_s))
        load = min(1.0, answers / max(room, 1e-9))
        burst = max((self._burst(kind, load * kind.most_answers, mix) for kind, num, _ in shares if num), default=0.0)
        late = mix.prompt.tokens > self._ttft_s * burst
        return pure > 0 and (late or self._beside(shares, load, mix) < PURE * pure)

    def displaced_by_one(self, kind: Kind, mix: Mix) -> float:
        """Mean prompts that a worker without answers computes fewer while it has one."""
        beside = self._pace(kind, 1.0, mix, self._tpot_s).tokens_a_second
        return max(0.0, kind.prompt_rate - beside) * mix.output_len * self._step_s / mix.prompt.tokens

    def delayed_by_one(self, kind: Kind, mix: Mix) -> float:
        """Mean answers whose place a worker that is full of answers has later by one mean prompt beside them. 0 where
        the target for TPOT bounds how many these are: what it leaves of a step no answer could use."""
        most = kind.most_answers
        if most < 1 or most >= FULL * _most_answers(kind.times, mix.context_len, self._step_s):
            return 0.0
        full = Beside(kind.times, most, most * mix.context_len, math.inf, math.inf)
        longer_s = full.pace(mix.prompt.pairs / mix.prompt.tokens, mix.prompt.tokens).step_s - full.decode_s
        return most * longer_s / (mix.output_len * full.decode_s)

    def _pace(self, kind: Kind, num_answers: float, mix: Mix, within_s: float) -> Pace:
        pairs = mix.prompt.pairs / mix.prompt.tokens
        return pace_of(
            kind.times, num_answers, num_answers * mix.context_len, pairs, within_s, kind.budget, kind.budget
        )

    def kinds(self, views: Sequence[WorkerView], mix: Mix, groups: KVGroups, held: Collection[str]) -> list[Kind]:
        """In the order in which they are to decode: first those that lose the least prompts by it."""

        def prompt_rate(times: StepTimes) -> float:
            return _prompt_rate(times, mix, DEFAULT_BUDGET)

        def answer_rate(times: StepTimes) -> float:
            return 1 / max(times.decode_step_s(1, round(mix.context_len)), LEAST_S)

        alike = [group for found in _alike(views, prompt_rate) for group in _alike(found, answer_rate)]
        return self.at(mix, [self._kind(group, mix, groups, held) for group in alike])

    def at(self, mix: Mix, kinds: Iterable[Kind]) -> list[Kind]:
        return sorted(
            (kind.at(mix, self._step_s) for kind in kinds),
            key=lambda kind: kind.prompt_rate / max(kind.most_answers, 1e-9),
        )

    def _kind(self, group: Sequence[WorkerView], mix: Mix, groups: KVGroups, held: Collection[str]) -> Kind:
        ordered = sorted(group, key=lambda view: (view.name not in held, -view.num_decoding, view.name))
        budget = float(group[0].max_step_tokens or DEFAULT_BUDGET)

        def typical(names: Callable[[str], bool], value: Callable[[StepTimes], float]) -> WorkerView:
            asked = [view for view in group if names(view.name)] or group
            return sorted(asked, key=lambda view: value(_times_of(view)))[len(asked) // 2]

        decode = typical(held.__contains__, lambda times: _most_answers(times, mix.context_len, self._step_s))
        other = typical(lambda name: name not in held, lambda times: _prompt_rate(times, mix, budget))
        return Kind(
            tuple(view.name for view in ordered),
            _times_of(decode),
            _times_of(other),
            FULL * groups.num_tokens(decode.num_total_blocks, mix.context_len),
            decode.max_num_seqs,
            budget,
        )


def num_late(lens: Sequence[int], workers: Sequence[tuple[float, int]], used: float, ttft_s: float) -> float:
    """Of prompts of these lengths, ascending, how many are expected to be late where they are computed by `workers`,
    (tokens a second, how many), which are busy for `used` of their time: by the wait for the first of several that is
    free (Sakasegawa 1977, with Pollaczek and Khinchine's factor for unequal lengths), whose tail is exponential."""
    if not lens:
        return 0.0
    count = sum(num for _, num in workers)
    rate = sum(rate * num for rate, num in workers) / max(count, 1)
    if rate <= 0 or used >= 1.0:
        return float(len(lens))
    waits = used ** (math.sqrt(2 * (count + 1)) - 1)
    wait_s = sum(num * num for num in lens) / (2 * sum(lens) * rate) / (count * (1 - used))
    late = 0.0
    for num in lens:
        left_s = ttft_s - num / rate
        late += waits * math.exp(-left_s / wait_s) if left_s > 0 else 1.0
    return late


def _largest(serves: Callable[[float], bool], high: float) -> float:
    """The largest factor below `high` that is served, where each smaller one is too; to 2^-14 of `high`."""
    low = 0.0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low


def _most_answers(times: StepTimes, context_len: float, target_s: float) -> float:
    """Answers that decode in a step of the target's length; less than one where none does."""
    own_s = times.sequence_s + context_len * times.kv_s
    if times.fixed_s + own_s + times.hidden_s(times.read_s, times.token_s) > target_s:
        return 0.0
    most = math.inf
    for read_s, token_s in times.lines:
        if own_s + token_s > 0:
            most = min(most, (target_s - times.fixed_s - read_s) / (own_s + token_s))
    return most


def _prompt_rate(times: StepTimes, mix: Mix, budget: float) -> float:
    """Tokens of prompts a second, with no answers."""
    pairs = mix.prompt.pairs / mix.prompt.tokens
    return pace_of(times, 0, 0, pairs, math.inf, budget, max(mix.prompt.tokens, budget)).tokens_a_second


def _times_of(view: WorkerView) -> StepTimes:
    assert view.times is not None, "asked of workers that know their steps alone"
    return view.times


def shares_of(kinds: Sequence[Kind], count: int) -> list[tuple[Kind, int, int]]:
    """(kind, workers that decode, workers that do not)."""
    shares = []
    for kind in kinds:
        num = min(count, len(kind.names))
        shares.append((kind, num, len(kind.names) - num))
        count -= num
    return shares


def _alike(views: Sequence[WorkerView], rate_of: Callable[[StepTimes], float]) -> list[list[WorkerView]]:
    """Groups of workers that are about as quick: fits differ by noise, and by what each has done. No
    bounds but gaps between them: two workers near a bound that was set would be of two kinds for nothing. And not by
    one coefficient: of steps that were all alike a fit knows the sum and not the parts."""
    groups: list[list[WorkerView]] = []
    before = math.inf
    for rate, view in sorted(((rate_of(_times_of(view)), view) for view in views), key=lambda entry: -entry[0]):
        if not groups or before > UNLIKE * rate:
            groups.append([])
        groups[-1].append(view)
        before = rate
    return groups
