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
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from services.router.placement.demand import Demand, Mix
from services.router.placement.headroom import USED, Headroom, Kind, shares_of
from services.router.placement.pairs import MOST_DISPLACED
from services.router.placement.views import Work, WorkerView
from shared.kv.groups import KVGroups

INTERVAL_S = 1.0
"""Between two decisions."""
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
WORTH = 1.25
"""A split has to be worth this many times what all workers doing both are. Hand-offs, workers of one part that wait for
the other, and what a mean mix does not say cost a tenth to a quarter of what the steps let expect. It has to be worth
as much more as the mean prompt may be wrong by, beyond KNOWN: else it turns with each long prompt of a slow stream."""
KNOWN = 0.05
"""Relative error up to which a mean prompt is known; WORTH includes it."""
MOST_SPLITS = 40
"""Most splits that are compared; of a larger fleet an even choice and the neighbours of the present one."""
SHORT = 0.1
"""Share of the target for TTFT: prompts that take less are refused by their place in the queue, others by their
length."""


class Split(NamedTuple):
    """A decision."""

    decodes: frozenset[str]
    """Workers that are to decode; the others prefill."""
    headroom: float
    """How many times the demand the fleet has room for with it; infinite where there is none."""


class Served(NamedTuple):
    """What a number of workers that decode would serve, the longest prompts refused first where not all have room."""

    share: float
    """Of the requests, those in time by both targets at RESERVE times the demand."""
    mix: Mix
    """What is left to be served."""
    room: float
    """How many times the mix the workers have room for."""


class SplitController:
    """Chooses the workers that decode."""

    def __init__(
        self,
        tpot_target_s: float,
        ttft_target_s: float = math.inf,
        demand: Demand | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """Targets of every request; infinite: none. Without one for TPOT every worker does both. With `apart` those
        that decode compute no prompts."""
        self.demand = demand or Demand()
        self._tpot_s = tpot_target_s
        self._ttft_s = ttft_target_s
        self.headroom = Headroom(tpot_target_s, ttft_target_s, apart=apart)
        """The room of splits, by which they are compared."""
        self._next_s = -math.inf
        self._left: dict[str, float] = {}  # when workers stopped being among those that decode
        self.split = Split(frozenset(), math.inf)
        """The newest decision."""
        self.displaced: Mapping[str, float] = {}
        """By worker that is not to decode: requests whose prompts it would compute in the time that it computes fewer
        for one answer, as far as the fleet is used."""
        self.delayed: Mapping[str, float] = {}
        """By worker that is to decode, where others are not: answers that it could run in place of one prompt, as far
        as the fleet is used."""
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

    def headrooms(
        self, views: Iterable[WorkerView], groups: KVGroups, now_s: float, present: int | None = None
    ) -> dict[int, float]:
        """By number of workers that decode, of the splits that are compared, which are those near `present`, or where
        that is None near the decision, and others; workers whose steps are not known count for none. Empty where
        nothing is known. Decides nothing."""
        known = [view for view in views if view.times is not None]
        if not self._can_tell(known):
            return {}
        mix = self.demand.mix(now_s)
        kinds = self.headroom.kinds(known, mix, groups, self.split.decodes)
        answers = self.headroom.answers(mix) * self._excess(known, mix)
        return {
            count: room * self.headroom.in_time(kinds, count, room, USED, answers, mix)
            for count, room in self._rooms(known, kinds, mix, present).items()
        }

    def _can_tell(self, known: Sequence[WorkerView]) -> bool:
        return bool(known) and self._tpot_s < math.inf

    def _rooms(
        self, known: Sequence[WorkerView], kinds: Sequence[Kind], mix: Mix, present: int | None = None
    ) -> dict[int, float]:
        """By number of workers that decode: how many times the demand they have room for."""
        if not any(kind.most_answers >= 1 for kind in kinds):
            return {}  # no worker meets the target even with one answer: nothing to be won by a split
        answers = self.headroom.answers(mix) * self._excess(known, mix)
        now = sum(view.name in self.split.decodes for view in known) if present is None else present
        size = len(known)
        return {
            count: self.headroom.room(kinds, count, answers, mix) * self.headroom.left_by_hand_off(count, size, mix)
            for count in _counts(size, now)
        }

    def _decide(self, views: Sequence[WorkerView], groups: KVGroups, now_s: float) -> Split:
        everyone = Split(frozenset(view.name for view in views), math.inf)
        self.displaced, self.delayed, self.is_pure = {}, {}, False
        known = [view for view in views if view.times is not None]
        if not self._can_tell(known) or self.demand.num_arrived < FEWEST_ARRIVALS:
            return everyone
        mix = self.demand.mix(now_s)
        kinds = self.headroom.kinds(known, mix, groups, self.split.decodes)
        rooms = self._rooms(known, kinds, mix)
        if not rooms:
            return everyone
        excess = self._excess(known, mix)
        found = self._in_time(kinds, rooms, excess, now_s)
        size, now = len(known), sum(view.name in self.split.decodes for view in known)
        best = _best(rooms, found, size, now)
        _, served, room = found[best]
        kinds = self.headroom.at(served, kinds)
        names = [name for kind in kinds for name in kind.names]
        unknown = [view.name for view in views if view.times is None]
        shares = shares_of(kinds, best)
        room *= self.headroom.left_by_hand_off(best, size, served)
        rate = min(mix.rate, served.rate * room)
        used = rate / max(served.rate * room, 1e-9)
        chosen = frozenset(names[:best])
        present = sum(view.num_decoding for view in known if view.name in chosen)
        self.is_pure = self.headroom.is_pure(shares, rate, served, present)
        self.displaced = {
            name: used * self.headroom.displaced_by_one(kind, served)
            for kind, num, rest in shares
            if rest
            for name in kind.names[num:]
        }
        if best < size:
            self.delayed = {
                name: used * self.headroom.delayed_by_one(kind, served)
                for kind, num, _ in shares
                for name in kind.names[:num]
            }
        return Split(chosen | frozenset(unknown), rooms[best])

    def _in_time(self, kinds: Sequence[Kind], counts: Iterable[int], excess: float, now_s: float) -> dict[int, Served]:
        """By number of workers that decode."""
        times, short_s = kinds[0].prompt_times, SHORT * self._ttft_s

        def cost(own: Work) -> float:
            return max(short_s, own.tokens * times.token_s + own.pairs * times.attention_s)

        parts = [(share, mix, self.headroom.at(mix, kinds)) for share, mix in self.demand.cheapest(now_s, cost)]
        found: dict[int, Served] = {}
        for count in counts:
            share, place, room = self._served(parts, count, excess)
            _, mix, there = parts[place]
            share *= self.headroom.long_enough(there, count, mix, self.demand)
            used, answers = min(USED, 1 / max(room, 1.0)), excess * self.headroom.answers(mix)
            share *= self.headroom.in_time(there, count, room, used, answers, mix)
            found[count] = Served(share, mix, room)
        return found

    def _served(
        self, parts: Sequence[tuple[float, Mix, Sequence[Kind]]], count: int, excess: float
    ) -> tuple[float, int, float]:
        """(the share of the requests for which there is room at RESERVE times the demand, the place of the mix that is
        nearest to it, how many times that mix there is room for)."""
        rooms: dict[int, float] = {}

        def room(place: int) -> float:
            _, mix, kinds = parts[place]
            size = sum(len(kind.names) for kind in kinds)
            left = self.headroom.left_by_hand_off(count, size, mix) / RESERVE
            rooms[place] = self.headroom.room(kinds, count, excess * self.headroom.answers(mix), mix)
            return rooms[place] * left

        least, most, before = 0, len(parts) - 1, room(0)
        if before >= 1.0:
            return 1.0, 0, rooms[0]
        after = room(most) if most else before
        if after < 1.0:
            return parts[most][0] * after, most, rooms[most]
        while most - least > 1:
            middle = (least + most) // 2
            there = room(middle)
            if there >= 1.0:
                most, after = middle, there
            else:
                least, before = middle, there
        if before <= 0.0:
            return parts[most][0], most, rooms[most]
        part = (1 - 1 / after) / max(1 / before - 1 / after, 1e-9)  # what is left out makes room in proportion
        return parts[most][0] + part * (parts[least][0] - parts[most][0]), most, rooms[most]

    def _excess(self, known: Sequence[WorkerView], mix: Mix) -> float:
        """How many times as many answers run as the mix lets expect, where more do: before long ones have ended, they
        are taken for shorter."""
        running = sum(view.num_decoding - view.num_promised for view in known)
        return max(1.0, running / self.headroom.answers(mix))


def _best(room: Mapping[int, float], served: Mapping[int, Served], size: int, now: int) -> int:
    """How many workers are to decode of `size`, where `now` do."""
    most = max(found.share for found in served.values())
    value = {
        count: found.share * max(1.0, room[count] / RESERVE) / (_worth(found.mix) if count < size else 1.0)
        for count, found in served.items()
    }
    alike = [count for count in value if count == size or served[count].share >= most - ALIKE]
    best = max(alike, key=value.__getitem__)
    is_near = now and (now == size or served[now].share >= most - 2 * ALIKE)
    return now if is_near and value[best] <= GAIN * value[now] else best


def _worth(mix: Mix) -> float:
    """How many times what all workers doing both are worth a split has to be."""
    return WORTH * (1.0 + max(0.0, mix.prompt_error - KNOWN))


def _counts(size: int, now: int) -> list[int]:
    """The numbers of decoding workers that are compared, from all of them down."""
    if size <= MOST_SPLITS:
        return list(range(size, 0, -1))
    even = {1 + round(step * (size - 1) / (MOST_SPLITS - 1)) for step in range(MOST_SPLITS)}
    near = {now + change for change in (-2, -1, 0, 1, 2)}
    return sorted({count for count in even | near if 1 <= count <= size}, reverse=True)
