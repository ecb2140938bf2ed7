"""Guesses that an answer repeats its own text or its prompt: what followed the same few tokens before.

The newest place where the last six tokens stood before is looked up in a hash table, where there is none that of the
last three, then two. From there the answer is followed: as long as each of its tokens is the one that stood there, the
match grows, and what comes next there is the guess. Every token tells whether the guess would have been right, made or
not; so how often guesses are right, by the length of their match, is learned while none is made, and at no cost.

O(1) a token: a look-up and an entry in each of three tables, which have 24 to 48 bytes for each token of the sequence.
"""

from __future__ import annotations

from array import array

import numpy as np

from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import LEAST_CHANCE, NO_DRAFT, Draft
from shared.engine.speculation.record import Record

ORDERS = (6, 3, 2)
"""Tokens of a match that is looked for, the longest first."""
MOST_MATCHED = 32
"""Tokens of a match that are counted."""
MANY_TOKENS = 64
"""Above, tokens are taken in all at once."""

_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D)  # of xxHash, all odd
_BITS = 32
_CLASSES = (2, 3, 4, 5, 6, 8, 12, 16, 24)
"""Lengths of matches from which on guesses are right more often than after shorter ones."""
_CLASS_OF = tuple(sum(length >= least for least in _CLASSES) for length in range(MOST_MATCHED + 1))
_FIRST_CHANCES = (0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Chance of one guess, by the class of its match, before any was seen."""
_FIRST_WEIGHT, _OWN_WEIGHT = 16.0, 6.0
"""In observations: of the first chances beside what all sequences showed, and of that beside what one did."""
_KEPT = 0.95
"""Weight of what a sequence showed, one observation later."""
_KEPT_BY_ALL = 0.998
"""Weight of what all sequences showed, one observation later."""


class NgramDrafter:
    """See `Drafter`."""

    method = "ngram"

    def __init__(self) -> None:
        self._all = Record(_FIRST_CHANCES, _FIRST_WEIGHT, _KEPT_BY_ALL)
        self._followers: dict[str, _Follower] = {}

    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        """See `Drafter`."""
        follower = self._followers.get(sequence.sequence_id)
        if follower is None or follower.token_ids is not sequence.token_ids:
            follower = self._followers[sequence.sequence_id] = _Follower(sequence.token_ids, self._all)
        follower.catch_up()
        return follower.guesses(most) if follower.at else NO_DRAFT

    def forget(self, sequence_id: str) -> None:
        """See `Drafter`."""
        self._followers.pop(sequence_id, None)


class _Follower:
    """One sequence's text, and the earlier place in it that its end repeats."""

    def __init__(self, token_ids: list[int], of_all: Record) -> None:
        """`token_ids`: the sequence's own list, which grows."""
        self.token_ids = token_ids
        self.at = 0  # index of the token that is guessed to come next; 0: none
        self._matched = 0  # tokens before it that are those at the end
        self._all = of_all
        self._own = Record(_FIRST_CHANCES, _OWN_WEIGHT, _KEPT)
        self._tables: list[array[int]] = []
        self._bits = 0
        self._num_seen = 0

    def catch_up(self) -> None:
        """Takes in the tokens that came since the last call."""
        count = len(self.token_ids)
        if (bits := (2 * count + 2).bit_length()) > self._bits:
            self._make_tables(max(10, bits))
        if count - self._num_seen > MANY_TOKENS:
            self.at = 0
            self._enter(self._num_seen, count - 1)
            self._num_seen = count - 1
        for index in range(self._num_seen, count):
            self._take(index)

    def guesses(self, most: int) -> Draft:
        """The tokens behind the earlier place; where they reach the sequence's end, they repeat from that place on."""
        token_ids, at, chance = self.token_ids, self.at, 1.0
        period = len(token_ids) - at
        found: list[int] = []
        chances: list[float] = []
        of_class, of_one = -1, 1.0
        for i in range(most):
            now = _CLASS_OF[min(self._matched + i, MOST_MATCHED)]
            if now != of_class:
                of_class, of_one = now, self._own.chance(now, self._all.chance(now))
            chance *= of_one
            if chance < LEAST_CHANCE:
                break
            found.append(token_ids[at + i % period])
            chances.append(chance)
        return Draft(tuple(found), tuple(chances))

    def _take(self, index: int) -> None:
        token_ids = self.token_ids
        if self.at:
            of_class, right = _CLASS_OF[self._matched], token_ids[self.at] == token_ids[index]
            self._own.add(of_class, right)
            self._all.add(of_class, right)
            if right:
                self.at += 1
                self._matched = min(self._matched + 1, MOST_MATCHED)
            else:
                self.at = 0
        self._num_seen = index + 1
        shift = _BITS - self._bits
        for order, table in zip(ORDERS, self._tables, strict=True):
            if index + 1 < order:
                continue
            key = 0
            for factor, token_id in zip(_FACTORS, token_ids[index + 1 - order : index + 1], strict=False):
                key += factor * token_id
            key = (key & 0xFFFFFFFF) >> shift
            before, table[key] = table[key], index + 1
            if before and not self.at:
                self._follow(before, index + 1, order)

    def _follow(self, before: int, end: int, order: int) -> None:
        """Follows the text behind `before`, unless another one's hash was found."""
        token_ids, matched = self.token_ids, 0
        while (
            matched < MOST_MATCHED
            and matched < before
            and token_ids[before - 1 - matched] == token_ids[end - 1 - matched]
        ):
            matched += 1
        if matched >= order:
            self.at, self._matched = before, matched

    def _make_tables(self, bits: int) -> None:
        """Makes tables with 2^bits entries, of the tokens that were seen."""
        self._bits = bits
        self._tables = [array("i", bytes(4 << self._bits)) for _ in ORDERS]
        self._enter(0, self._num_seen)

    def _enter(self, begin: int, end: int) -> None:
        """Takes the tokens from `begin` to `end` into the tables: those of a prompt, or that came during a rest."""
        first = max(0, begin + 1 - max(ORDERS))
        token_ids = np.array(self.token_ids[first:end], dtype=np.uint64)
        for order, table in zip(ORDERS, self._tables, strict=True):
            start = max(0, begin + 1 - order)  # of the first `order` tokens that end behind `begin`
            num_places = end + 1 - order - start
            if num_places <= 0:
                continue
            keys = np.zeros(num_places, dtype=np.uint64)
            for offset, factor in zip(range(order), _FACTORS, strict=False):
                place = start - first + offset
                keys += np.uint64(factor) * token_ids[place : place + num_places]
            keys = (keys & np.uint64(0xFFFFFFFF)) >> np.uint64(_BITS - self._bits)
            # Of equal keys the last one stays.
            np.frombuffer(table, dtype=np.int32)[keys.astype(np.int64)] = np.arange(
                start + order, end + 1, dtype=np.int32
            )
