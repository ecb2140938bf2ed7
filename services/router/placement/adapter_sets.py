"""For each adapter a few of a role's workers, its homes: where its requests go first, so that few workers load it.

Which: those with the highest hash of adapter and worker (rendezvous hashing: Thaler and Ravishankar, 1998), so that all
routers agree without a word, and a worker that comes or goes moves no more than its own share. How many: as many as the
adapter's share of the recent work needs, at once when that grows, and slowly fewer when it shrinks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from hashlib import blake2b

from services.router.placement.views import Pool

GROWS_S, SHRINKS_S = 3.0, 60.0
"""Time in which a share is forgotten to 1/e: a set has the size of the larger of both shares."""
HEADROOM = 2.0
"""Homes over the workers that would be busy with the adapter's share alone: with one, a busy home has another beside
it."""
MAX_ADAPTERS = 4096
"""Most adapters with work or homes on record; the ones that were asked for longest ago are forgotten first."""


class _Recent:
    """Requests and their tokens, which are forgotten exponentially."""

    __slots__ = ("_at_s", "_time_s", "requests", "tokens")

    def __init__(self, time_s: float) -> None:
        self._time_s, self._at_s = time_s, 0.0
        self.requests = self.tokens = 0.0

    def add(self, num_tokens: int, now_s: float) -> None:
        """One more request, of `num_tokens`."""
        self.forget(now_s)
        self.requests += 1.0
        self.tokens += num_tokens

    def forget(self, now_s: float) -> None:
        """Brings both sums to a time, which may have been reached already."""
        if now_s > self._at_s:
            kept = math.exp((self._at_s - now_s) / self._time_s)
            self.requests, self.tokens, self._at_s = kept * self.requests, kept * self.tokens, now_s


class _Sums:
    """Recent work, over both times."""

    __slots__ = ("both",)

    def __init__(self) -> None:
        self.both = (_Recent(GROWS_S), _Recent(SHRINKS_S))

    def add(self, num_tokens: int, now_s: float) -> None:
        for each in self.both:
            each.add(num_tokens, now_s)


class AdapterSets:
    """The homes of all adapters of one model. Plain numbers; takes the time as an argument."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._own: OrderedDict[str, _Sums] = OrderedDict()
        self._ranked: OrderedDict[tuple[Pool, str], tuple[int, tuple[str, ...]]] = OrderedDict()

    def placed(self, adapter: str, num_tokens: int, now_s: float) -> None:
        """A request was placed, of an adapter or (empty) of the base model, whose work is `num_tokens`."""
        self._all.add(num_tokens, now_s)
        if not adapter:
            return
        own = self._own.get(adapter)
        if own is None:
            own = self._own[adapter] = _Sums()
            if len(self._own) > MAX_ADAPTERS:
                self._own.popitem(last=False)
        self._own.move_to_end(adapter)
        own.add(num_tokens, now_s)

    def share(self, adapter: str, now_s: float) -> float:
        """The adapter's share of the work, in [0, 1]: the larger of the recent and the longer one, each less a standard
        deviation of so few requests, so that one request alone makes no adapter a hot one."""
        own = self._own.get(adapter)
        if own is None:
            return 0.0
        found = 0.0
        for part, whole in zip(own.both, self._all.both, strict=True):
            part.forget(now_s)
            if part.requests > 1.0:
                whole.forget(now_s)
                found = max(found, (1.0 - part.requests**-0.5) * part.tokens / whole.tokens)
        return min(1.0, found)

    def size(self, adapter: str, num_workers: int, now_s: float) -> int:
        """The number of an adapter's homes among `num_workers`: at least one, at most all."""
        return max(1, min(num_workers, math.ceil(HEADROOM * self.share(adapter, now_s) * num_workers)))

    def homes(self, adapter: str, pool: Pool, now_s: float) -> tuple[str, ...]:
        """Names of its homes in a pool, the first one first; empty for an empty pool."""
        key = (pool, adapter)
        version, ranked = self._ranked.get(key, (-1, ()))
        if version != pool.version:
            ranked = tuple(sorted((view.name for view in pool), key=lambda name: _weight(adapter, name), reverse=True))
            self._ranked[key] = pool.version, ranked
            if len(self._ranked) > MAX_ADAPTERS:
                self._ranked.popitem(last=False)
        self._ranked.move_to_end(key)
        return ranked[: self.size(adapter, len(ranked), now_s)]


def _weight(adapter: str, worker: str) -> bytes:
    return blake2b(worker.encode(), key=adapter.encode()[:64], digest_size=8).digest()
