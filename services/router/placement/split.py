"""Which workers of one pool decode and which only prefill, decided anew each second. Pure policy, no clock of its own.

A fleet of W workers may be split in any way between both ends: one that decodes beside W - 1 that prefill, up to all W
doing both. Each split is judged by its headroom: how many times the present demand it could serve, with every step as
long as the target for TPOT allows. By that target a worker that decodes has room for so many answers, and what is left
of each step computes chunks of prompts; a worker that does not decode computes prompts at its full pace. So whether
reading the weights once for both is worth more than decoding on few workers follows from the steps' own coefficients.

The decision is a preference: it moves no weight, ends nothing, and no cache is lost. It holds for what comes next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.router.placement.paces import DEFAULT_BUDGET, Pace, pace_of
from services.router.placement.views import Work, WorkerView
from shared.engine.scheduler.pacing import AIM, GAP_TARGETS
from shared.sizing.step_time import StepTimes

INTERVAL_S = 1.0
"""Between two decisions."""
WINDOW_S = 10.0
"""Demand is a running mean in which an arrival of this age weighs 1/e."""
PURE = 0.1
"""Of the prompts that workers compute which do not decode: where the others could compute fewer beside the answers that
there are, they compute none."""
SETTLED_S = 5.0
"""After this time a worker that is not to decode any more loses the answers that it still has. Seconds."""
FEWEST_ARRIVALS = 8
"""With fewer seen nothing is decided: every worker does both."""
GAIN = 1.03
"""A split replaces the present one where its headroom is this many times as large."""
WORTH = 1.05
"""A split has to have this many times the headroom of all workers doing both: hand-offs cost what is not counted."""
FIRST_OUTPUT_GUESS = 128.0
"""Tokens of an answer, before any has ended."""
MOST_SPLITS = 40
"""That are compared; of a larger fleet an even choice and the neighbours of the present one."""
FULL = 0.9
"""Share of a worker's blocks that answers may hold by the forecast."""
TTFT_SHARE = 0.5
"""Of its target, what the chunks of a mean prompt may take beside answers that are ahead of theirs; else only others
compute prompts."""


class Demand:
    """What arrives and what has ended, as running means. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._at_s = -math.inf
        self._begin_s = math.inf
        self._count = self._tokens = self._pairs = self._context = 0.0
        self.num_arrived = 0
        self.output_len = FIRST_OUTPUT_GUESS
        """Mean tokens of an answer."""
        self._num_ended = 0

    def arrived(self, own: Work, num_tokens: int, now_s: float) -> None:
        """A request of `num_tokens`, of which `own` is to be computed."""
        self._decay(now_s)
        self._begin_s = min(self._begin_s, now_s)
        self.num_arrived += 1
        self._count += 1
        self._tokens += own.tokens
        self._pairs += own.pairs
        self._context += num_tokens

    def ended(self, num_output_tokens: int) -> None:
        """An answer has ended."""
        self._num_ended += 1
        self.output_len += max(0.02, 1.0 / self._num_ended) * (num_output_tokens - self.output_len)

    def rate(self, now_s: float) -> float:
        """Requests a second."""
        self._decay(now_s)
        seen_s = WINDOW_S * -math.expm1(-max(1.0, now_s - self._begin_s) / WINDOW_S)
        return self._count / seen_s

    @property
    def prompt(self) -> Work:
        """What a request has to compute in the mean."""
        count = max(self._count, 1e-9)
        return Work(max(1, round(self._tokens / count)), self._pairs / count)

    @property
    def num_gaps(self) -> float:
        """Between the tokens of an answer, in the mean: what its TPOT divides by; at least one."""
        return max(1.0, self.output_len - 1.0)

    @property
    def context_len(self) -> float:
        """Tokens of a running answer with its prompt, in the mean over its life."""
        return self._context / max(self._count, 1e-9) + self.output_len / 2

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            kept = math.exp((self._at_s - now_s) / WINDOW_S)
            self._count, self._tokens = kept * self._count, kept * self._tokens
            self._pairs, self._context = kept * self._pairs, kept * self._context
            self._at_s = now_s


@dataclass(frozen=True, slots=True)
class Kind:
    """Workers of one hardware, by what they can do at the present mix of requests."""

    names: tuple[str, ...]
    """Those that are to decode first."""
    times: StepTimes
    prompt_rate: float
    """Tokens of prompts a second, with no answers."""
    most_answers: float
    """That the target for TPOT and the blocks allow."""
    budget: float


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

    def decodes(self, views: Iterable[WorkerView], block_size: int, now_s: float) -> frozenset[str]:
        """The workers that are to decode, decided anew where that is due. None of the names: all of them."""
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            found = list(views)
            self._take(self._decide(found, block_size, now_s), frozenset(view.name for view in found), now_s)
        return self.split.decodes

    def _take(self, split: Split, names: frozenset[str], now_s: float) -> None:
        before = self.split.decodes
        self.num_flips += len((split.decodes ^ before) & names & self._names)
        self.split, self._names = split, names
        self._left |= dict.fromkeys(before - split.decodes, now_s)
        self._left = {name: at_s for name, at_s in self._left.items() if name not in split.decodes}

    def vacated(self, now_s: float) -> frozenset[str]:
        """Workers whose answers are to move to those that decode: they have not been among these for a while."""
        if not self._left:
            return frozenset()
        return frozenset(name for name, at_s in self._left.items() if now_s - at_s >= SETTLED_S)

    def headrooms(self, views: Iterable[WorkerView], block_size: int, now_s: float) -> dict[int, float]:
        """By number of workers that decode, of the splits that are compared; workers whose steps are not known count
        for none. Empty where nothing can be told. Decides nothing."""
        known = [view for view in views if view.times is not None]
        return self._compared(known, self._kinds(known, block_size), now_s) if self._can_tell(known) else {}

    def _can_tell(self, known: Sequence[WorkerView]) -> bool:
        return bool(known) and self._tpot_s < math.inf

    def _compared(self, known: Sequence[WorkerView], kinds: Sequence[Kind], now_s: float) -> dict[int, float]:
        if not any(kind.most_answers >= 1 for kind in kinds):
            return {}  # no worker meets the target even with one answer: nothing to be won by a split
        rate = self.demand.rate(now_s)
        running = sum(view.num_decoding - view.num_promised for view in known)
        answers = max(rate * self.demand.output_len * self._step_s, float(running), 1e-9)
        tokens_s = max(rate * self.demand.prompt.tokens, 1e-9)
        now = sum(view.name in self.split.decodes for view in known)
        size = len(known)
        found = {count: self._headroom(kinds, count, answers, tokens_s) for count in _counts(size, now)}
        return {count: room if count == size else room * self._left_by_hand_off for count, room in found.items()}

    def _decide(self, views: Sequence[WorkerView], block_size: int, now_s: float) -> Split:
        everyone = Split(frozenset(view.name for view in views), math.inf)
        self.displaced, self.is_pure = {}, False
        known = [view for view in views if view.times is not None]
        if not self._can_tell(known) or self.demand.num_arrived < FEWEST_ARRIVALS:
            return everyone
        kinds = self._kinds(known, block_size)
        headroom = self._compared(known, kinds, now_s)
        if not headroom:
            return everyone
        size, now = len(known), sum(view.name in self.split.decodes for view in known)
        best = max(headroom, key=headroom.__getitem__)
        if headroom[best] <= WORTH * headroom[size]:
            best = size
        if now and headroom[best] <= GAIN * headroom[now] and headroom[now] > headroom[size]:
            best = now
        names = [name for kind in kinds for name in kind.names]
        unknown = [view.name for view in views if view.times is None]
        used, rate = min(1.0, 1.0 / max(headroom[best], 1e-9)), self.demand.rate(now_s)
        shares = _shares(kinds, best)
        self.is_pure = self._is_pure(shares, rate * min(1.0, headroom[best]))
        self.displaced = {
            name: used * self._displaced_by_one(kind) for kind, num, rest in shares if rest for name in kind.names[num:]
        }
        return Split(frozenset(names[:best] + unknown), headroom[best])

    @property
    def _left_by_hand_off(self) -> float:
        """The share of both targets that is left to the steps of a request that is handed over."""
        of_answer = 1.0 - self.gap_s / self.demand.num_gaps / self._tpot_s
        of_prompt = 1.0 - self.hand_off_s / self._ttft_s if self.hand_off_s else 1.0
        return max(0.0, of_answer) * max(0.0, of_prompt)

    def _kinds(self, views: Sequence[WorkerView], block_size: int) -> list[Kind]:
        """In the order in which they are to decode: first those that lose the least prompts by it."""
        groups: dict[int, list[WorkerView]] = {}
        for view in views:
            assert view.times is not None
            groups.setdefault(_class_of(view.times), []).append(view)
        kinds = [self._kind(group, block_size) for group in groups.values()]
        return sorted(kinds, key=lambda kind: kind.prompt_rate / max(kind.most_answers, 1e-9))

    def _kind(self, group: Sequence[WorkerView], block_size: int) -> Kind:
        held = self.split.decodes
        ordered = sorted(group, key=lambda view: (view.name not in held, -view.num_decoding, view.name))
        prompt, context_len = self.demand.prompt, self.demand.context_len
        budget = float(group[0].max_step_tokens or DEFAULT_BUDGET)

        def most_answers(view: WorkerView) -> float:
            return _most_answers(view.times, context_len, self._step_s) if view.times is not None else 0.0

        def prompt_rate(view: WorkerView) -> float:
            assert view.times is not None
            pairs = prompt.pairs / prompt.tokens
            return pace_of(view.times, 0, 0, pairs, math.inf, budget, max(prompt.tokens, budget)).tokens_a_second

        # What a worker has not done for long it knows badly: those that decode tell of answers, the others of prompts.
        decoding = [view for view in group if view.name in held] or group
        others = [view for view in group if view.name not in held] or group
        typical = sorted(decoding, key=most_answers)[len(decoding) // 2]
        assert typical.times is not None
        rate = statistics.median(map(prompt_rate, others))
        room = FULL * typical.num_total_blocks * block_size / (context_len + self.demand.output_len / 2)
        most = max(0.0, min(most_answers(typical), room, typical.max_num_seqs))
        return Kind(tuple(view.name for view in ordered), typical.times, rate, most, budget)

    def _headroom(self, kinds: Sequence[Kind], count: int, answers: float, tokens_s: float) -> float:
        """How many times the demand is served where the first `count` workers decode: the largest factor at which
        prompts and answers both have room."""
        shares = _shares(kinds, count)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        if room <= 0:
            return 0.0
        pure = sum(rest * kind.prompt_rate for kind, _, rest in shares)
        low, high = 0.0, room / answers
        if pure + self._beside(shares, 1.0) >= high * tokens_s:
            return high
        for _ in range(14):
            middle = (low + high) / 2
            if pure + self._beside(shares, middle * answers / room) >= middle * tokens_s:
                low = middle
            else:
                high = middle
        return low

    def _beside(self, shares: Sequence[tuple[Kind, int, int]], load: float) -> float:
        """Tokens of prompts a second beside answers, each worker holding that share of the answers it may."""
        total, prompt = 0.0, self.demand.prompt
        for kind, num, _ in shares:
            if not num:
                continue
            num_answers = load * kind.most_answers
            pace = self._pace(kind, num_answers, prompt, self._tpot_s)
            burst = self._pace(kind, num_answers, prompt, GAP_TARGETS / AIM * self._tpot_s)
            if burst.seconds(prompt.tokens) <= TTFT_SHARE * self._ttft_s and pace.step_s <= self._tpot_s:
                total += num * pace.tokens_a_second
        return total

    def _is_pure(self, shares: Sequence[tuple[Kind, int, int]], rate: float) -> bool:
        """Whether prompts beside answers could be hardly any of all at that rate of requests."""
        pure = sum(rest * kind.prompt_rate for kind, _, rest in shares)
        room = sum(num * kind.most_answers for kind, num, _ in shares)
        answers = rate * self.demand.output_len * self._step_s
        return pure > 0 and self._beside(shares, min(1.0, answers / max(room, 1e-9))) < PURE * pure

    def _displaced_by_one(self, kind: Kind) -> float:
        """Mean prompts that a worker without answers computes fewer while it has one."""
        prompt = self.demand.prompt
        beside = self._pace(kind, 1.0, prompt, self._tpot_s).tokens_a_second
        return max(0.0, kind.prompt_rate - beside) * self.demand.output_len * self._step_s / prompt.tokens

    def _pace(self, kind: Kind, num_answers: float, prompt: Work, within_s: float) -> Pace:
        context = num_answers * self.demand.context_len
        return pace_of(
            kind.times, num_answers, context, prompt.pairs / prompt.tokens, within_s, kind.budget, kind.budget
        )


def _most_answers(times: StepTimes, context_len: float, target_s: float) -> float:
    """That decode in a step of the target's length; less than one where none does."""
    own_s = times.sequence_s + context_len * times.kv_s
    if times.fixed_s + own_s + times.hidden_s(times.read_s, times.token_s) > target_s:
        return 0.0
    most = math.inf
    for read_s, token_s in times.lines:
        if own_s + token_s > 0:
            most = min(most, (target_s - times.fixed_s - read_s) / (own_s + token_s))
    return most


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


def _class_of(times: StepTimes) -> int:
    """Workers whose products take about as long are alike, to a power of two: fits differ by noise."""
    return round(math.log2(max(times.token_s, 1e-12)))
