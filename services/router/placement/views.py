"""Placement's view of the fleet and of a request: workers in pools and shards, prefix hits, work."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, islice
from typing import NamedTuple

from services.router.placement.beside import Known
from services.router.placement.founded import FoundedTimes
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepTimes


class Work(NamedTuple):
    """Tokens pass through the projections; in attention each token meets all before it. Pairs grow with the square of
    the length: 40,000 tokens in one prompt take much longer than in forty."""

    tokens: int = 0
    pairs: float = 0.0
    """Pairs of a token to compute and a token that it attends to."""

    @classmethod
    def of(cls, num_uncached: int, num_cached: int) -> Work:
        """The work of a prompt whose first `num_cached` tokens are cached."""
        return cls(num_uncached, num_uncached * (num_cached + num_uncached / 2))


NO_WORK = Work()


class Replicas:
    """The routers that serve the fleet, as the workers report them. Plain data.

    All their views are one step old. A worker that looks idle to one router looks idle to the others, and all would
    choose it. Workers report which routers are connected to them; each router assigns workers to routers by a hash of
    their names and reaches the same assignment without talking to the others. Among equals it prefers its own shard,
    whose queues it knows best, because most of their work is in its own ledger. Any router may still use any worker;
    when a router goes, its shard is assigned anew.
    """

    def __init__(self) -> None:
        self._routers_of: dict[str, tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """All routers that any worker reports, sorted."""
        return sorted(self._counts)

    def update_routers(self, worker: str, routers: Sequence[str]) -> bool:
        """Sets a worker's connected routers, empty if there is only one; returns whether `names` changed."""
        routers = tuple(routers)
        before = self._routers_of.get(worker, ())
        if routers == before:
            return False
        num_before = set(self._counts)
        self._counts.subtract(before)
        self._counts.update(routers)
        self._counts += Counter()  # drops routers that no worker reports any more
        if routers:
            self._routers_of[worker] = routers
        else:
            self._routers_of.pop(worker, None)
        return set(self._counts) != num_before


class Tier(IntEnum):
    """Where a worker has an adapter; the nearer one counts."""

    FOLDER = 0
    """The adapter is to be read from its folder."""
    HOST = 1
    """A copy in the host's memory."""
    READY = 2
    """In a slot: its requests start at once."""


GUEST_AFTER_S = 0.5
"""A worker of another router's shard counts as one's own once no other router's prompt was seen there for this long,
which is longer than any report is old. Seconds."""
GUEST_TURN_S = 0.25
"""Delay for each router whose turn comes before, seconds. All routers see a worker become idle by the same report:
without turns all that have requests waiting would use it at once."""


def own_workers(workers: Collection[str], router: str, routers: Sequence[str]) -> set[str]:
    """The shard of `router`; all workers if it is alone or if there are fewer workers than routers."""
    if router not in routers or len(workers) < len(routers):
        return set(workers)
    first = sorted(routers).index(router)
    return set(sorted(workers)[first :: len(routers)])


def guest_times_s(workers: Collection[str], router: str, routers: Sequence[str]) -> dict[str, float]:
    """By worker, `WorkerView.guest_after_s`. Each worker has its own order of routers: every router comes first
    somewhere."""
    place = sorted(routers).index(router) if router in routers else 0
    turns = {name: (place - number) % max(1, len(routers)) for number, name in enumerate(sorted(workers))}
    return {name: GUEST_AFTER_S + GUEST_TURN_S * max(0, turn - 1) for name, turn in turns.items()}


@dataclass(slots=True)
class WorkerView:
    """One worker as the router sees it now. A `Ledger` updates it in place, so that a decision allocates no views."""

    name: str
    num_free_blocks: int
    num_total_blocks: int
    num_requests: int
    """Running or waiting there, this router's commitments included."""
    max_num_seqs: int
    num_queued_tokens: int
    """Prompt tokens it still has to compute."""
    num_queued_pairs: float = 0.0
    """(token, attended token) pairs, see `Work`; estimated."""
    accepting: bool = True
    """Connected, not draining, and not found full since its last report."""
    label: tuple[str, ...] = ()
    """Location, widest first: ("zone-a", "rack-3", "nvlink-1"). Empty: unknown."""
    in_shard: bool = True
    """In this router's shard: of several routers, this one uses it first."""
    guest_after_s: float = GUEST_AFTER_S
    """For how long no other router's prompt must have been seen there, where it is not. Seconds."""
    exclusive_since_s: float = -math.inf
    """Since when no other router's prompt was seen there; infinity while there is one."""
    num_decoding: int = 0
    """Answers that run there, or will once their prompt is computed or has arrived."""
    num_context_tokens: int = 0
    """Tokens of those."""
    num_promised: int = 0
    """Answers that do not run yet."""
    num_promised_tokens: int = 0
    """Tokens of the answers that do not run yet."""
    times: StepTimes | None = None
    """What its steps take, as it has learnt; None before it has."""
    max_step_tokens: int = 0
    """Tokens that one of its steps computes at most; 0 = not known."""
    reported_s: float = math.inf
    """When its newest report came; infinite: none has. Seconds."""
    least_slack_s: float | None = None
    """Seconds that the running answer nearest to missing its target is ahead of it; None without any, or a target."""
    adapters: Mapping[str, Tier] = field(default_factory=dict)
    """Digests of the adapters that it knows → where it has them."""
    loading_adapters: frozenset[str] = frozenset()
    """Digests of those that come into a slot just now."""
    adapter_room: int | None = None
    """Further adapters that it could load at once, the others' requests being served; None: not known."""
    known: Known | None = field(default=None, compare=False, repr=False)
    """What `paces.py` has worked out from the fields above, which it compares."""

    @property
    def queued(self) -> Work:
        """The work it still has to compute."""
        return Work(self.num_queued_tokens, self.num_queued_pairs)


class Pool:
    """The connected workers of one role, in a list for random sampling."""

    __slots__ = ("_is_shared", "_places", "_replicas", "_router", "_views", "founded", "version")

    def __init__(self, router: str = "") -> None:
        """`router`: the name of the router that owns this view."""
        self._router = router
        self._replicas = Replicas()
        self._is_shared = False
        self._views: list[WorkerView] = []
        self._places: dict[str, int] = {}
        self.founded = FoundedTimes()
        """The step times to go by, the workers' own where these rest on enough."""
        self.version = 0
        """Another one whenever a worker has come or gone, or has measured its steps for the first time."""

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
        self.version += 1
        self._places[view.name] = len(self._views)
        self._views.append(view)
        self._assign_shard()

    def remove(self, name: str) -> None:
        """Removes a worker; unknown names are ignored. The last view moves to its position in the list."""
        place = self._places.pop(name, None)
        if place is None:
            return
        self.founded.forget(name)
        self.version += 1
        last = self._views.pop()
        if place < len(self._views):
            self._views[place] = last
            self._places[last.name] = place
        self._replicas.update_routers(name, ())
        self._assign_shard()

    def update_routers(self, worker: str, routers: Sequence[str]) -> None:
        """Sets a worker's connected routers, empty if there is only one. Recomputes this router's shard."""
        if self._replicas.update_routers(worker, routers):
            self._assign_shard()

    def _assign_shard(self) -> None:
        routers = self._replicas.names
        if not routers and not self._is_shared:
            return
        self._is_shared = bool(routers)
        own = own_workers(self._places, self._router, routers)
        times_s = guest_times_s(self._places, self._router, routers)
        for view in self._views:
            view.in_shard, view.guest_after_s = view.name in own, times_s[view.name]

    @property
    def shared(self) -> bool:
        """Whether other routers serve it too."""
        return self._is_shared

    def draw(self, rng: random.Random, count: int) -> list[WorkerView]:
        """`count` different workers at random, or all if there are fewer."""
        if count >= len(self._views):
            return list(self._views)
        return rng.sample(self._views, count)

    def from_random_start(self, rng: random.Random) -> Iterator[WorkerView]:
        """All workers once, from a random start: a search that stops early favours none."""
        start = rng.randrange(len(self._views)) if self._views else 0
        return chain(islice(self._views, start, None), islice(self._views, start))


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that clients may ask for."""

    name: str
    digest: str
    rank: int
    num_bytes: int = field(default=0, compare=False)
    """Memory that it takes on a worker, where these may differ."""


@dataclass(frozen=True, slots=True)
class PrefixPeer:
    """A worker from which others can fetch a prompt's first blocks."""

    name: str
    address: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """How many leading tokens of a prompt have their KV, by location."""

    local: Mapping[str, int] = field(default_factory=dict)
    """By worker name, in the worker's own pool."""
    peer: int = 0
    """The longest hit in one worker's pool."""
    store: int = 0
    """The longest hit in the store's host memory or disk."""
    holders: tuple[str, ...] = ()
    """The workers that hold at least half of the longest hit, longest first: always considered."""
    num_stored_blocks: int | None = 0
    """Blocks of the prefix up to the last one in the store; earlier ones may be elsewhere. None: unknown."""
    peers: tuple[PrefixPeer, ...] = ()
    """The few workers with the longest hits, longest first: the chosen worker can fetch from them."""

    @classmethod
    def of(cls, local: Mapping[str, int], store: int = 0, num_stored_blocks: int = 0) -> PrefixHits:
        """Builds all fields from the hits by worker."""
        longest = max(local.values(), default=0)
        best = [name for name, tokens in local.items() if tokens > 0 and 2 * tokens >= longest]
        best.sort(key=lambda name: -local[name])
        return cls(local, longest, store, tuple(best), num_stored_blocks)

    def peers_of(self, name: str) -> list[PrefixPeer]:
        """Peers that hold more of the prefix than the named worker."""
        own = self.local.get(name, 0)
        return [peer for peer in self.peers if self.local[peer.name] > own]


NO_HITS = PrefixHits()
UNKNOWN_HITS = PrefixHits(num_stored_blocks=None)


@dataclass(slots=True)  # not frozen: making it takes a third of the time then, and each choice makes one
class PlacementRequest:
    """What one request needs of a worker."""

    num_tokens: int
    """Prompt tokens, plus those that a retried request has already produced."""
    groups: KVGroups
    """Groups of the fleet's KV."""
    hits: PrefixHits = NO_HITS
    session: str = ""
    """Turns of one conversation share it; empty = none."""
    slack_s: float = math.inf
    """Seconds until the deadline of its first token."""
    now_s: float = math.inf
    """The current time, on the clock of `WorkerView.exclusive_since_s`."""
    excluded: frozenset[str] = frozenset()
    """Workers that already failed this request: not chosen while their pool has others."""
    adapter: str = ""
    """Digest of its adapter; empty: the base model."""
    cut: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By decode worker: prefill workers whose blocks do not reach it; see `CutPairs`."""
    never_here: bool = False
    """Its prompt is computed by prefill workers alone."""
    num_blocks: int = field(init=False)
    """For the current tokens and one more."""
    _whole: Work | None = field(init=False, default=None, repr=False, compare=False)
    """Its work where no token is cached, once it was asked for: most workers have none."""

    def __post_init__(self) -> None:
        """Counts the blocks, once for all workers."""
        self.num_blocks = self.groups.num_blocks(self.num_tokens + 1)

    def is_reachable(self, decode: str, prefills: Pool) -> bool:
        """Whether a decode worker can be reached from the pool, by any worker that takes requests."""
        cut = self.cut.get(decode)
        if cut is None or not len(prefills):
            return True
        return any(view.accepting and view.name not in cut for view in prefills)

    def num_hit_tokens(self, name: str, least: float = 0.0) -> int:
        """Prompt tokens in the worker's pool; 0 if fewer than `least`."""
        num_tokens = self.hits.local.get(name, 0)
        return num_tokens if num_tokens >= least else 0

    def num_missing_blocks(self, name: str, least_hit: float = 0.0, step_tokens: int = 1) -> int:
        """Blocks of the request that the worker does not hold yet; `step_tokens`: that it computes of it at once, 1
        where the prompt's KV arrives."""
        num_tokens = self.hits.local.get(name, 0)
        if step_tokens == 1 and (not num_tokens or num_tokens < least_hit):
            return self.num_blocks
        num_held = num_tokens if num_tokens >= least_hit else 0
        return self.groups.num_missing(self.num_tokens + 1, num_held, step_tokens)

    def num_uncached_tokens(self, name: str, least_hit: float = 0.0) -> int:
        """Tokens that the worker would compute: at least the last one, which yields the next token. Hits of fewer
        tokens than `least_hit` count as none."""
        num_tokens = self.hits.local.get(name, 0)
        return max(1, self.num_tokens - num_tokens if num_tokens >= least_hit else self.num_tokens)

    def work(self, name: str) -> Work:
        """The work that the worker would have to compute."""
        if name not in self.hits.local:
            if self._whole is None:
                self._whole = Work.of(max(1, self.num_tokens), 0)
            return self._whole
        num_uncached = self.num_uncached_tokens(name)
        return Work.of(num_uncached, self.num_tokens - num_uncached)
