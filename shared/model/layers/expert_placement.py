"""Which experts of a layer each set of ranks holds, so that all sets have about the same work. Pure arithmetic.

A set is as busy as the tokens that choose its experts; of an expert that several sets hold, each computes an equal
part. A step waits for the busiest set.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

Sets = tuple[tuple[int, ...], ...]
"""Ids of each set's experts, ascending."""
Placement = tuple[Sets | None, ...]
"""Sets of each layer of the whole model; None: adjacent ranges. An empty one: adjacent ranges in all layers."""


def balance(loads: Sequence[Sequence[int] | None], num_sets: int, spare: int) -> Placement:
    """Experts moved between sets, and the hottest held by several, where that makes the busiest set less busy.

    Args:
        loads: of each layer the tokens that chose each expert, [num_experts]; None where unknown.
        num_sets: at most num_experts.
        spare: experts that a set may hold beside `ceil(num_experts / num_sets)`; with 0 none has a copy.

    Every expert is in one set at least, and in no set twice. More `spare` makes no layer's busiest set busier.
    """
    return tuple(None if counts is None else _balance_layer(counts, num_sets, spare) for counts in loads)


def adjacent(num_experts: int, num_sets: int) -> tuple[range, ...]:
    """Each set's experts without measurements; their numbers differ by one at most."""
    edges = [num_experts * edge // num_sets for edge in range(num_sets + 1)]
    return tuple(range(begin, end) for begin, end in pairwise(edges))


def holders(sets: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """For each expert the numbers of the sets that hold it, ascending: copy 0, 1, …"""
    found: dict[int, list[int]] = {}
    for number, experts in enumerate(sets):
        for expert in experts:
            found.setdefault(expert, []).append(number)
    return tuple(tuple(found[expert]) for expert in range(len(found)))


def set_loads(counts: Sequence[int], sets: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Tokens of each set, an expert's divided over its copies."""
    shares = [count / len(held) for count, held in zip(counts, holders(sets), strict=True)]
    return tuple(sum(shares[expert] for expert in experts) for experts in sets)


def _balance_layer(counts: Sequence[int], num_sets: int, spare: int) -> Sets | None:
    if len(set(counts)) == 1:
        return None  # nothing measured, or nothing to choose by
    best, least = None, max(set_loads(counts, adjacent(len(counts), num_sets)))
    fewest = -(-len(counts) // num_sets)
    for room in range(fewest, fewest + spare + 1):
        num_copies = _num_copies(counts, num_sets, num_sets * room - len(counts) if room > fewest else 0)
        sets = _pack(counts, num_copies, num_sets, room)
        if (busiest := max(set_loads(counts, sets))) < least:
            best, least = sets, busiest
    return best


def _num_copies(counts: Sequence[int], num_sets: int, num_extra: int) -> list[int]:
    """The copies of each expert: one more, again and again, for the one whose copies have the most tokens each."""
    num_copies = [1] * len(counts)
    if num_sets == 1:
        return num_copies
    hottest = [(-float(count), expert) for expert, count in enumerate(counts) if count]
    heapq.heapify(hottest)
    while num_extra and hottest:
        _, expert = heapq.heappop(hottest)
        num_copies[expert] += 1
        num_extra -= 1
        if num_copies[expert] < num_sets:
            heapq.heappush(hottest, (-counts[expert] / num_copies[expert], expert))
    return num_copies


def _pack(counts: Sequence[int], num_copies: Sequence[int], num_sets: int, room: int) -> Sets:
    """Longest processing time first (Graham 1969): the largest part that is left goes to the set with the fewest
    tokens. A copy is left out where all sets with room hold its expert already; its first one never is."""
    sets: list[set[int]] = [set() for _ in range(num_sets)]
    loads = [0.0] * num_sets
    shares = sorted((-count / num_copies[expert], expert) for expert, count in enumerate(counts))
    for negative, expert in shares:
        for _ in range(num_copies[expert]):
            free = [n for n in range(num_sets) if len(sets[n]) < room and expert not in sets[n]]
            if not free:
                break
            # No set stays empty: of equals, the one with the fewest experts.
            chosen = min(free, key=lambda n: (loads[n], len(sets[n]), n))
            sets[chosen].add(expert)
            loads[chosen] -= negative
    return tuple(tuple(sorted(experts)) for experts in sets)
