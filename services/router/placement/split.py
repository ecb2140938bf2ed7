"""Which workers of one pool decode and which only prefill, decided anew each second. Pure policy, no clock of its own.

A fleet of W workers may be split in any way between both ends: one that decodes beside W - 1 that prefill, up to all W
doing both. Each split is judged by its headroom: how many times the present demand it could serve, with every step as
long as the target for TPOT allows. By that target a worker that decodes has room for some answers, and what is left of
each step computes chunks of prompts; a worker that does not decode computes prompts at its full pace. So whether
reading the weights once for both is worth more than decoding on few workers follows from the steps' own coefficients.

The decision is a preference: it moves no weight, ends nothing, and no cache is lost. It holds for what comes next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from services.router.placement.beside import DEFAULT_BUDGET, Pace, pace_of
from services.router.placement.demand import Demand, Mix
from services.router.placement.pairs import MOST_DISPLACED
from services.router.placement.views import Work, WorkerView
from shared.engine.scheduler.pacing import AIM, GAP_TARGETS
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepTimes

INTERVAL_S = 1.0
"""Between two decisions."""
PURE = 0.1
"""Of the prompts that workers compute which do not decode: where the others could compute fewer beside the answers that
there are, they compute none."""
SETTLED_S = 5.0
"""After this time a worker that is not to decode any more loses the answers that it still has. Seconds."""
FEWEST_ARRIVALS = 8
"""With fewer seen nothing is decided: every worker does both."""
GAIN = 1.03
"""A split replaces the present one where it is worth this many times as much."""
RESERVE = 1.25
"""Times the demand, of which as many requests as can be are to be in time: bursts are above the mean."""
ALIKE = 0.03
"""Splits by which shares of the requests are in time that differ by less are equal, and where all are in time the one
with more headroom is better; the present one is kept until it is twice that behind."""
UNLIKE = 1.6
"""Workers whose prompts take this many times as long as the next quicker one's are of another hardware."""
WORTH = 1.25
"""A split has to be worth this many times what all workers doing both are. Hand-offs, workers of one part that wait for
the other, and what a mean mix does not say cost a tenth to a quarter of what the steps let expect."""
MOST_SPLITS = 40
"""Most splits that are compared; of a larger fleet an even choice and the neighbours of the present one."""
SHORT = 0.1
"""Share of the target for TTFT: prompts that take less are refused by their place in the queue, others by their
length."""
FULL = 0.9
"""Share of a worker's blocks that answers may hold by the forecast."""
TTFT_SHARE = 0.5
"""Share of its target that the chunks of a mean prompt may take beside answers that are ahead of theirs; else only
others compute prompts."""


class Kind(NamedTuple):
    """Workers of one hardware, by what they can do at some mix of requests."""

    names: tuple[str, ...]
    """Workers in the order in which they are to decode."""
    times: StepTimes
    """As those that decode know them …"""
    prompt_times: StepTimes
    """… and as the others do. What a worker has not done for long it knows badly."""
    num_tokens: float
    """Whose KV answers may hold in a worker's blocks."""
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


class Split(NamedTuple):
    """A decision."""

    decodes: frozenset[str]
    """Workers that are to decode; the others prefill."""
    headroom: float
    """How many times the demand the fleet could serve with it; infinite where there is none."""


class SplitController:
    """Chooses the workers that decode."""

    def __init__(self, tpot_target_s: float, ttft_target_s: float = math.inf, demand: Demand | None = None) -> None:
        """Targets of every request; infinite: none. Without one for TPOT every worker does both."""
        self.demand = demand or Demand()
        self._tpot_s = tpot_target_s
        self._step_s = AIM * tpot_target_s  # of workers that decode, with and without chunks: neither gets the rest
        self._ttft_s = ttft_target_s
        self.gap_s = 0.0
        """From a first token that was computed elsewhere to the second one, seconds: what a hand-off takes of the
        target for TPOT …"""
        self.hand_off_s = 0.0
        """… and its messages, of the target for TTFT."""
        self._next_s = -math.inf
        self._left: dict[str, float] = {}  # when workers stopped being among those that decode
        self.split = Split(frozenset(), math.inf)
        """The newest decision."""
        self.displaced: Mapping[str, float] = {}
        """By worker that is not to decode: requests whose prompts it would compute in the time that it computes fewer
        for one answer, as far as the fleet is used."""
        self.is_pure = False
        """Workers that decode are to compute no prompts beside answers: they could compute hardly any."""
        self.num_flips = 0
        """Changes of a worker's preference."""
        self._names: frozenset[str] = frozenset()

    def decodes(self, views: Iterable[WorkerView], groups: KVGroups, now_s: float) -> frozenset[str]:
        """The workers that are to decode, decided anew where that is due. None of the names: all of them."""
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            found = list(views)
            self._take(self._decide(found, groups, now_s), frozenset(view.name for view in found), now_s)
        return self.split.decodes

    def _take(self, split: Split, names: frozenset[str], now_s: float) -> None:
        before = self.split.decodes or names
        self.num_flips += len((split.decodes ^ before) & names & self._names)
        self.split, self._names = split, names
        self._left |= dict.fromkeys(before - split.decodes, now_s)
        self._left = {name: at_s for name, at_s in self._left.items() if name not in split.decodes}

    def vacated(self, now_s: float) -> frozenset[str]:
        """Workers whose answers are to move to those that decode: they have not been among these for a while, or by two
        decisions where each answer takes more of their prompts than it gives."""
        if not self._left:
            return frozenset()
        return frozenset(name for name, at_s in self._left.items() if now_s - at_s >= self._settled_s(name))

    def _settled_s(self, name: str) -> float:
        return INTERVAL_S if self.displaced.get(name, 0.0) > MOST_DISPLACED else SETTLED_S

    def headrooms(self, views: Iterable[WorkerView], groups: KVGroups, now_s: float) -> dict[int, float]:
        """By number of workers that decode, of the splits that are compared; workers whose steps are not known count
        for none. Empty where nothing is known. Decides nothing."""
        known = [view for view in views if view.times is not None]
        if not self._can_tell(known):
            return {}
        mix = self.demand.mix(now_s)
        return self._compared(known, self._kinds(known, mix, groups), mix)

    def _can_tell(self, known: Sequence[WorkerView]) -> bool:
        return bool(known) and self._tpot_s < math.inf

    def _compared(self, known: Sequence[WorkerView], kinds: Sequence[Kind], mix: Mix) -> dict[int, float]:
        if not any(kind.most_answers >= 1 for kind in kinds):
            return {}  # no worker meets the target even with one answer: nothing to be won by a split
        answers = self._answers(mix) * self._excess(known, mix)
        now = sum(view.name in self.split.decodes for view in known)
        size = len(known)
        return {
            count: self._headroom(kinds, count, answers, mix) * self._left_by_hand_off(count, size, mix)
            for count in _counts(size, now)
        }

    def _decide(self, views: Sequence[WorkerView], groups: KVGroups, now_s: float) -> Split:
        everyone = Split(frozenset(view.name for view in views), math.inf)
        self.displaced, self.is_pure = {}, False
        known = [view for view in views if view.times is not None]
        if not self._can_tell(known) or self.demand.num_arrived < FEWEST_ARRIVALS:
            return everyone
        mix = self.demand.mix(now_s)
        kinds = self._kinds(known, mix, groups)
        headroom = self._compared(known, kinds, mix)
        if not headroom:
            return everyone
        excess = self._excess(known, mix)
        in_time = self._in_time(kinds, headroom, excess, now_s)
        size, now = len(known), sum(view.name in self.split.decodes for view in known)
        most = max(share for share, _ in in_time.values())
        value = {
            count: share * max(1.0, headroom[count] / RESERVE) / (WORTH if count < size else 1.0)
            for count, (share, _) in in_time.items()
        }
        alike = [count for count in value if count == size or in_time[count][0] >= most - ALIKE]
        best = max(alike, key=value.__getitem__)
        is_near = now and (now == size or in_time[now][0] >= most - 2 * ALIKE)
        if is_near and value[best] <= GAIN * value[now]:
            best = now
        served = in_time[best][1]
        kinds = self._at(served, kinds)
        names = [name for kind in kinds for name in kind.names]
        unknown = [view.name for view in views if view.times is None]
        shares = _shares(kinds, best)
        room = self._headroom(kinds, best, excess * self._answers(served), served)
        room *= self._left_by_hand_off(best, size, served)
        rate = min(mix.rate, served.rate * room)
        used = rate / max(served.rate * room, 1e-9)
        chosen = frozenset(names[:best])
        present = sum(view.num_decoding for view in known if view.name in chosen)
        self.is_pure = self._is_pure(shares, rate, served, present)
        self.displaced = {
            name: used * self._displaced_by_one(kind, served)
            for kind, num, rest in shares
            if rest
            for name in kind.names[num:]
        }
        return Split(chosen | frozenset(unknown), headroom[best])

    def _in_time(
        self, kinds: Sequence[Kind], counts: Iterable[int], excess: float, now_s: float
    ) -> dict[int, tuple[float, Mix]]:
        """By number of workers that decode: the share of the requests that are in time at RESERVE times the demand,
        where the longest ones are refused first, and the mix of the others."""
        times, short_s = kinds[0].prompt_times, SHORT * self._ttft_s

        def cost(own: Work) -> float:
            return max(short_s, own.tokens * times.token_s + own.pairs * times.attention_s)

        parts = [(share, mix, self._at(mix, kinds)) for share, mix in self.demand.cheapest(now_s, cost)]
        found: dict[int, tuple[float, Mix]] = {}
        for count in counts:
            served, place = self._served(parts, count, excess)
            _, mix, there = parts[place]
            found[count] = served * self._long_enough(there, count, mix), mix
        return found

    def _served(
        self, parts: Sequence[tuple[float, Mix, Sequence[Kind]]], count: int, excess: float
    ) -> tuple[float, int]:
        """(the share of the requests for which there is room, the place of the mix that is nearest to it)."""

        def room(place: int) -> float:
            _, mix, kinds = parts[place]
            size = sum(len(kind.names) for kind in kinds)
            left = self._left_by_hand_off(count, size, mix) / RESERVE
            return self._headroom(kinds, count, excess * self._answers(mix), mix) * left

        least, most, before = 0, len(parts) - 1, room(0)
        if before >= 1.0:
            return 1.0, 0
        after = room(most) if most else before
        if after < 1.0:
            return parts[most][0] * after, most
        while most - least > 1:
            middle = (least + most) // 2
            there = room(middle)
            if there >= 1.0:
                most, after = middle, there
            else:
                least, before = middle, there
        if before <= 0.0:
            return parts[most][0], most
        part = (1 - 1 / after) / max(1 / before - 1 / after, 1e-9)  # what is left out makes room in proportion
        return parts[most][0] + part * (parts[least][0] - parts[most][0]), most

    def _answers(self, mix: Mix) -> float:
        """Answers that run at a time, with steps as long as they may be."""
        return max(1e-9, mix.rate * mix.output_len * self._step_s)

    def _excess(self, known: Sequence[WorkerView], mix: Mix) -> float:
        """How many times as many answers run as the mix lets expect, where more do: before long ones have ended, they
        are taken for shorter."""
        running = sum(view.num_decoding - view.num_promised for view in known)
        return max(1.0, running / self._answers(mix))

    def _left_by_hand_off(self, count: int, size: int, mix: Mix) -> float:
        """The share of both targets that is left to the steps of a request that is handed over; 1 where all do both."""
        if count >= size:
            return 1.0
        of_answer = 1.0 - self.gap_s / max(1.0, mix.output_len - 1.0) / self._tpot_s
        of_prompt = 1.0 - self.hand_off_s / self._ttft_s if self.hand_off_s else 1.0
        return max(0.0, of_answer) * max(0.0, of_prompt)

    def _long_enough(self, kinds: Sequence[Kind], count: int, mix: Mix) -> float:
        """The share of the answers with tokens enough to make up for the gap behind the first one, by steps as they are
        with that many answers, or as long as chunks make them where prompts are computed beside: the others are late
        wherever they are handed over. 1 where all do both."""
        shares = _shares(kinds, count)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        if not any(rest for _, _, rest in shares) or room <= 0:
            return 1.0
        is_pure = self._is_pure(shares, mix.rate, mix)
        load = min(1.0, self._answers(mix) / room)
        paces = [self._pace(kind, load * kind.most_answers, mix, self._tpot_s) for kind, num, _ in shares if num]
        step_s = max(pace.decode_s if is_pure else pace.step_s for pace in paces)
        if self.gap_s <= step_s:
            return 1.0
        return self.demand.share_with_gaps((self.gap_s - step_s) / max(self._tpot_s - step_s, 1e-9))

    def _kinds(self, views: Sequence[WorkerView], mix: Mix, groups: KVGroups) -> list[Kind]:
        """In the order in which they are to decode: first those that lose the least prompts by it."""

        def prompt_rate(times: StepTimes) -> float:
            return _prompt_rate(times, mix, DEFAULT_BUDGET)

        return self._at(mix, [self._kind(group, mix, groups) for group in _alike(views, prompt_rate)])

    def _at(self, mix: Mix, kinds: Iterable[Kind]) -> list[Kind]:
        return sorted(
            (kind.at(mix, self._step_s) for kind in kinds),
            key=lambda kind: kind.prompt_rate / max(kind.most_answers, 1e-9),
        )

    def _kind(self, group: Sequence[WorkerView], mix: Mix, groups: KVGroups) -> Kind:
        held = self.split.decodes
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

    def _headroom(self, kinds: Sequence[Kind], count: int, answers: float, mix: Mix) -> float:
        """How many times the demand is served where the first `count` workers decode: the largest factor at which
        prompts and answers both have room."""
        shares = _shares(kinds, count)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        if room <= 0:
            return 0.0
        pure, tokens_s = sum(rest * kind.prompt_rate for kind, _, rest in shares), mix.tokens_s
        low, high = 0.0, room / answers
        if pure + self._beside(shares, 1.0, mix) >= high * tokens_s:
            return high
        for _ in range(14):
            middle = (low + high) / 2
            if pure + self._beside(shares, middle * answers / room, mix) >= middle * tokens_s:
                low = middle
            else:
                high = middle
        return low

    def _beside(self, shares: Sequence[tuple[Kind, int, int]], load: float, mix: Mix) -> float:
        """Tokens of prompts a second beside answers, each worker holding that share of the answers it may."""
        total = 0.0
        for kind, num, _ in shares:
            if not num:
                continue
            num_answers = load * kind.most_answers
            pace = self._pace(kind, num_answers, mix, self._tpot_s)
            burst = self._pace(kind, num_answers, mix, GAP_TARGETS / AIM * self._tpot_s)
            if burst.seconds(mix.prompt.tokens) <= TTFT_SHARE * self._ttft_s and pace.step_s <= self._tpot_s:
                total += num * pace.tokens_a_second
        return total

    def _is_pure(
        self, shares: Sequence[tuple[Kind, int, int]], rate: float, mix: Mix, most_answers: float = math.inf
    ) -> bool:
        """Whether prompts beside answers could be hardly any of all at that rate of requests, or beside as many answers
        as there are."""
        pure = sum(rest * kind.prompt_rate for kind, _, rest in shares)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        answers = max(1.0, min(most_answers, rate * mix.output_len * self._step_s))
        return pure > 0 and self._beside(shares, min(1.0, answers / max(room, 1e-9)), mix) < PURE * pure

    def _displaced_by_one(self, kind: Kind, mix: Mix) -> float:
        """Mean prompts that a worker without answers computes fewer while it has one."""
        beside = self._pace(kind, 1.0, mix, self._tpot_s).tokens_a_second
        return max(0.0, kind.prompt_rate - beside) * mix.output_len * self._step_s / mix.prompt.tokens

    def _pace(self, kind: Kind, num_answers: float, mix: Mix, within_s: float) -> Pace:
        pairs = mix.prompt.pairs / mix.prompt.tokens
        return pace_of(
            kind.times, num_answers, num_answers * mix.context_len, pairs, within_s, kind.budget, kind.budget
        )


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


def _shares(kinds: Sequence[Kind], count: int) -> list[tuple[Kind, int, int]]:
    """(kind, workers that decode, workers that do not)."""
    shares = []
    for kind in kinds:
        num = min(count, len(kind.names))
        shares.append((kind, num, len(kind.names) - num))
        count -= num
    return shares


def _counts(size: int, now: int) -> list[int]:
    """The numbers of decoding workers that are compared, from all of them down."""
    if size <= MOST_SPLITS:
        return list(range(size, 0, -1))
    even = {1 + round(step * (size - 1) / (MOST_SPLITS - 1)) for step in range(MOST_SPLITS)}
    near = {now + change for change in (-2, -1, 0, 1, 2)}
    return sorted({count for count in even | near if 1 <= count <= size}, reverse=True)


def _alike(views: Sequence[WorkerView], prompt_rate: Callable[[StepTimes], float]) -> list[list[WorkerView]]:
    """Groups of workers that compute prompts about as quickly: fits differ by noise, and by what each has done. No
    bounds but gaps between them: two workers near a bound that was set would be of two kinds for nothing. And not by
    one coefficient: of steps that were all alike a fit knows the sum and not the parts."""
    groups: list[list[WorkerView]] = []
    before = math.inf
    for rate, view in sorted(((prompt_rate(_times_of(view)), view) for view in views), key=lambda entry: -entry[0]):
        if not groups or before > UNLIKE * rate:
            groups.append([])
        groups[-1].append(view)
        before = rate
    return groups
