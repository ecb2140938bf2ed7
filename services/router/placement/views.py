"""What placement knows of the fleet and of a request."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from services.router.placement.router_shards import Replicas, own_workers
from services.router.placement.work import Work


@dataclass(slots=True)
class WorkerView:
    """One worker as the router sees it now. A `Ledger` keeps it true in place, so that a decision builds nothing."""

    name: str
    num_free_blocks: int
    num_total_blocks: int
    num_requests: int
    """Running or waiting there, this router's commitments included."""
    max_num_seqs: int
    num_queued_tokens: int
    """Prompt tokens it still has to compute."""
    num_queued_pairs: float = 0.0
    """See `Work`; estimated."""
    accepting: bool = True
    """Connected, not draining, and not just found full."""
    label: tuple[str, ...] = ()
    """Where it stands, widest first: ("zone-a", "rack-3", "nvlink-1"). Empty: unknown."""
    in_shard: bool = True
    """Part of this router's shard: of several routers, this one uses it first."""
    ours_since_s: float = -math.inf
    """Since when no other router was seen to have a prompt there; infinity while one is."""

    @property
    def queued(self) -> Work:
        """What it still has to compute."""
        return Work(self.num_queued_tokens, self.num_queued_pairs)


class Pool:
    """The connected workers of one role, in a list that can be drawn from."""

    __slots__ = ("_dealt", "_places", "_replicas", "_router", "_views")

    def __init__(self, router: str = "") -> None:
        """`router`: the name of the one that looks at it."""
        self._router = router
        self._replicas = Replicas()
        self._dealt = False
        self._views: list[WorkerView] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._views)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def get(self, name: str) -> WorkerView | None:
        """The worker's view, None while it is not connected."""
        place = self._places.get(name)
        return None if place is None else self._views[place]

    def add(self, view: WorkerView) -> None:
        """A worker has connected; replaces an earlier view of its name."""
        self.remove(view.name)
        self._places[view.name] = len(self._views)
        self._views.append(view)
        self._deal()

    def remove(self, name: str) -> None:
        """A worker is gone; unknown names are ignored. The last view takes its place in the list."""
        place = self._places.pop(name, None)
        if place is None:
            return
        last = self._views.pop()
        if place < len(self._views):
            self._views[place] = last
            self._places[last.name] = place
        self._replicas.update_routers(name, ())
        self._deal()

    def update_routers(self, worker: str, routers: Sequence[str]) -> None:
        """A worker's list of connected routers, empty where there is only one. Recomputes this router's shard."""
        if self._replicas.update_routers(worker, routers):
            self._deal()

    def _deal(self) -> None:
        routers = self._replicas.names
        if not routers and not self._dealt:
            return
        self._dealt = bool(routers)
        own = own_workers(self._places, self._router, routers)
        for view in self._views:
            view.in_shard = view.name in own

    @property
    def shared(self) -> bool:
        """Whether other routers serve it too."""
        return self._dealt

    def draw(self, rng: random.Random, count: int) -> list[WorkerView]:
        """`count` different workers at random, all of them where there are no more."""
        if count >= len(self._views):
            return list(self._views)
        return rng.sample(self._views, count)

    def from_random_start(self, rng: random.Random) -> Iterator[WorkerView]:
        """All workers, once each, beginning anywhere: a search that stops early favours none."""
        start = rng.randrange(len(self._views)) if self._views else 0
        return chain(islice(self._views, start, None), islice(self._views, start))


@dataclass(frozen=True, slots=True)
class PrefixPeer:
    """A worker that others may have a prompt's first blocks from."""

    name: str
    address: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """How many of a prompt's tokens, from the first on, have their KV somewhere."""

    local: Mapping[str, int] = field(default_factory=dict)
    """By worker name, in the worker's own pool."""
    peer: int = 0
    """The most that any one worker's pool holds."""
    store: int = 0
    """The most that the store's host memory or disk holds."""
    holders: tuple[str, ...] = ()
    """The workers that hold at least half of the longest hit, the longest first: worth looking at in any fleet."""
    num_stored_blocks: int | None = 0
    """Blocks of the prefix up to the last one that the store has, wherever those before it are; None: not known."""
    peers: tuple[PrefixPeer, ...] = ()
    """The few workers that hold the most, longest first: the chosen worker can fetch from them."""

    @classmethod
    def of(cls, local: Mapping[str, int], store: int = 0, num_stored_blocks: int = 0) -> PrefixHits:
        """Hits by worker, with what follows from them."""
        longest = max(local.values(), default=0)
        best = [name for name, tokens in local.items() if tokens > 0 and 2 * tokens >= longest]
        best.sort(key=lambda name: -local[name])
        return cls(local, longest, store, tuple(best), num_stored_blocks)

    def peers_of(self, name: str) -> list[PrefixPeer]:
        """Those that hold more of the prefix than the worker of this name."""
        own = self.local.get(name, 0)
        return [peer for peer in self.peers if self.local[peer.name] > own]


NO_HITS = PrefixHits()
UNKNOWN_HITS = PrefixHits(num_stored_blocks=None)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What one request asks of a worker."""

    num_tokens: int
    """Prompt, and what a retried request had already produced."""
    block_size: int
    hits: PrefixHits = NO_HITS
    session: str = ""
    """Turns of one conversation share it; empty = none."""
    slack_s: float = math.inf
    """Seconds until its first token is due."""
    now_s: float = math.inf
    """The moment, on the clock of `WorkerView.ours_since_s`."""
    excluded: frozenset[str] = frozenset()
    """Workers that failed this request before: not chosen again while their pool has any other."""

    @property
    def num_blocks(self) -> int:
        """Blocks for the tokens known now and one more."""
        return -(-(self.num_tokens + 1) // self.block_size)

    def num_hit_tokens(self, name: str, least: float = 0.0) -> int:
        """Of the prompt, how many tokens lie in the worker's pool; 0 where they are fewer than `least`."""
        num_tokens = self.hits.local.get(name, 0)
        return num_tokens if num_tokens >= least else 0

    def num_missing_blocks(self, name: str, least_hit: float = 0.0) -> int:
        """Blocks of the request that the worker does not hold yet."""
        return max(0, self.num_blocks - self.num_hit_tokens(name, least_hit) // self.block_size)

    def num_uncached_tokens(self, name: str, least_hit: float = 0.0) -> int:
        """What the worker would have to compute: at least the last token, which has to be run to get the next. Hits of
        fewer tokens than `least_hit` count as none."""
        return max(1, self.num_tokens - self.num_hit_tokens(name, least_hit))

    def work(self, name: str) -> Work:
        """What the worker would have to compute."""
        num_uncached = self.num_uncached_tokens(name)
        return Work.of(num_uncached, self.num_tokens - num_uncached)
