"""The workers of a pool by what they are to do, and samples of both kinds."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from itertools import chain, repeat

from services.router.placement.views import WorkerView


class Parts:
    """The workers that are to prefill, and those that are to decode. A sample of a large pool has half of each: where
    eight of 300 are of one kind, hardly one of them would be in a sample of the whole."""

    def __init__(self, views: Iterable[WorkerView] = (), decoding: Collection[str] = ()) -> None:
        """`decoding`: the names of those that are to decode."""
        self.prefills: list[WorkerView] = []
        self.decodes: list[WorkerView] = []
        for view in views:
            (self.decodes if view.name in decoding else self.prefills).append(view)

    def draw(self, rng: random.Random, count: int) -> list[WorkerView]:
        """`count` different workers at random, or all if there are fewer, of both kinds in turns."""
        prefills, decodes = self._drawn(rng, count)
        in_turns = list(chain.from_iterable(zip(prefills, decodes, strict=False)))
        shared = len(in_turns) // 2
        return in_turns + prefills[shared:] + decodes[shared:]

    def draw_weighted(self, rng: random.Random, count: int) -> list[tuple[WorkerView, float]]:
        """The same in any order, each with the number of workers for which it stands."""
        prefills, decodes = self._drawn(rng, count)
        of_prefills, of_decodes = len(self.prefills) / max(1, len(prefills)), len(self.decodes) / max(1, len(decodes))
        return [*zip(prefills, repeat(of_prefills)), *zip(decodes, repeat(of_decodes))]

    def draw_prefills(self, rng: random.Random, count: int) -> list[WorkerView]:
        """`count` different ones of those that are to prefill at random, or all if there are fewer."""
        return _sample(rng, self.prefills, min(count, len(self.prefills)))

    def _drawn(self, rng: random.Random, count: int) -> tuple[list[WorkerView], list[WorkerView]]:
        num_decodes = min(len(self.decodes), max(count // 2, count - len(self.prefills)))
        num_prefills = min(len(self.prefills), count - num_decodes)
        return _sample(rng, self.prefills, num_prefills), _sample(rng, self.decodes, num_decodes)


def _sample(rng: random.Random, views: list[WorkerView], count: int) -> list[WorkerView]:
    return views if count == len(views) else rng.sample(views, count)
