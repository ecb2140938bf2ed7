"""Scorers: how well a worker suits a request, in [0, 1]. A new one is a function and an entry of `SCORERS`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from services.router.placement.views import PlacementRequest, Tier, WorkerView

Stage = Literal["prefill", "decode", "collocated"]
"""Which worker is being chosen: prefill, decode, or collocated."""


@dataclass(frozen=True, slots=True)
class TierWeights:
    """Value of a prompt token's KV by its location; local ≥ peer ≥ store."""

    local: float = 1.0
    peer: float = 0.5
    store: float = 0.25


@dataclass(slots=True)  # not frozen: see `PlacementRequest`
class ScoringContext:
    """A scorer's input besides the worker."""

    request: PlacementRequest
    least_hit: float = 0.0
    """Hits of fewer tokens count as none."""
    scale_tokens: int = 1
    """Queue length in tokens at which a load score is 0.5."""
    tiers: TierWeights = TierWeights()
    last: str = ""
    """The worker that served the session's last turn at this stage; empty = none."""
    near: tuple[str, ...] = ()
    """Label of the chosen decode worker; empty = unknown."""
    homes: tuple[str, ...] = ()
    """The workers that are to have the request's adapter; see `AdapterSets`."""
    least_queued: int = 0
    """Prompt tokens in the shortest queue among the workers that are compared."""


def _always(_: ScoringContext) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Scorer:
    """A rating of workers. A worker's score is the weighted mean of the scorers' values."""

    setting: str
    """Name of its weight among the placement settings."""
    name: str
    """Its name in `tandem explain`."""
    stages: tuple[Stage, ...]
    """The stages at which it is used."""
    default_weight: float
    """0 = off by default."""
    doc: str
    """Documentation of the setting."""
    score: Callable[[WorkerView, ScoringContext], float]
    """In [0, 1]; pure."""
    applies: Callable[[ScoringContext], bool] = _always
    """False for a request that it cannot rate: then it is left out of the mean."""


def decode_load(view: WorkerView, context: ScoringContext) -> float:
    """The mean of two shares: blocks free after this request, and free batch slots."""
    missing = context.request.num_missing_blocks(view.name, context.least_hit)
    blocks = max(0, view.num_free_blocks - missing) / max(1, view.num_total_blocks)
    places = max(0, view.max_num_seqs - view.num_requests) / max(1, view.max_num_seqs)
    return min(1.0, (blocks + places) / 2)


_OWN_POOL = TierWeights(1.0, 0.0, 0.0)  # a decode worker fetches no prefix


def prefix_hit(view: WorkerView, context: ScoringContext, tiers: TierWeights) -> float:
    """(w_local · local + w_peer · (peer − local) + w_store · (store − max(local, peer))) / prompt tokens.

    Negative differences count as 0: a farther place counts only for tokens that nearer ones lack. Local hits of fewer
    tokens than the context's `least_hit` count as 0 too.
    """
    request = context.request
    hits = request.hits
    local = request.num_hit_tokens(view.name, context.least_hit)
    worth = tiers.local * local
    if hits.peer > local:
        worth += tiers.peer * (hits.peer - local)
    near = max(local, hits.peer)
    if hits.store > near:
        worth += tiers.store * (hits.store - near)
    return min(1.0, worth / max(1, request.num_tokens))


def stickiness(view: WorkerView, context: ScoringContext) -> float:
    """1 for the worker that served the session's last turn at this stage, else 0."""
    return 1.0 if view.name == context.last else 0.0


def _has_last(context: ScoringContext) -> bool:
    return bool(context.last)


class SessionTable:
    """The last workers of each session, for the `limit` most recent sessions."""

    def __init__(self, limit: int) -> None:
        """`limit` 0 keeps none."""
        self._limit = limit
        self._last: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, session: str) -> tuple[str, str]:
        """(prefill worker, decode worker) of the last turn; empty names where unknown."""
        return self._last.get(session, ("", ""))

    def note(self, session: str, prefill: str, decode: str) -> None:
        """Records a placed turn. An empty `prefill` (the decode worker prefilled) keeps the earlier name."""
        if not session or not self._limit:
            return
        self._last[session] = (prefill or self.last(session)[0], decode)
        self._last.move_to_end(session)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)


def prefill_load(view: WorkerView, context: ScoringContext) -> float:
    """1 / (1 + (queued + uncached) / scale): load and prefix hits in one unit, tokens to compute."""
    num_uncached = context.request.num_uncached_tokens(view.name, context.least_hit)
    return 1.0 / (1.0 + (view.num_queued_tokens + num_uncached) / context.scale_tokens)


def nearness(view: WorkerView, context: ScoringContext) -> float:
    """Leading parts that both labels share, over the parts of the longer one; 0 if one is unknown.

    With labels zone/rack/domain, the same zone gives 1/3, the same rack 2/3, the same NVLink domain 1.
    """
    longest = max(len(view.label), len(context.near))
    if not longest:
        return 0.0
    shared = 0
    for mine, other in zip(view.label, context.near, strict=False):
        if mine != other:
            break
        shared += 1
    return shared / longest


_SAME_QUEUE, _LONGER_QUEUE = 0.3, 0.6
"""Between these, in `scale_tokens` by which its queue is longer than the shortest one, a worker's adapter counts less
and less."""


def adapter_residency(view: WorkerView, context: ScoringContext) -> float:
    """0.9 where the adapter is ready to compute with, 0.1 more on one of its homes; 0.5 for a home that has to load it.
    All of it while the worker's queue is about as short as any, nothing where waiting would take longer than a load."""
    is_home = view.name in context.homes
    if view.adapters.get(context.request.adapter) is Tier.READY:
        value = 1.0 if is_home else 0.9
    else:
        value = 0.5 if is_home else 0.0
    longer = (view.num_queued_tokens - context.least_queued) / context.scale_tokens
    return value * min(1.0, max(0.0, (_LONGER_QUEUE - longer) / (_LONGER_QUEUE - _SAME_QUEUE)))


SCORERS: tuple[Scorer, ...] = (
    Scorer(
        setting="decode_load",
        name="load",
        stages=("decode", "collocated"),
        default_weight=1.0,
        doc="Decode worker: free blocks and batch slots.",
        score=decode_load,
    ),
    Scorer(
        setting="decode_prefix",
        name="prefix",
        stages=("decode", "collocated"),
        default_weight=1.0,
        doc="Decode worker: holds much of the prompt, which need not be transferred.",
        score=lambda view, context: prefix_hit(view, context, _OWN_POOL),
        applies=lambda context: bool(context.request.hits.local),
    ),
    Scorer(
        setting="decode_session",
        name="session",
        stages=("decode", "collocated"),
        default_weight=0.1,
        doc="Decode worker: served the conversation's last turn.",
        score=stickiness,
        applies=_has_last,
    ),
    Scorer(
        setting="prefill_load",
        name="queue",
        stages=("prefill", "collocated"),
        default_weight=1.0,
        doc="Prefill worker: few tokens to compute before the first token.",
        score=prefill_load,
    ),
    Scorer(
        setting="prefix",
        name="prefix",
        stages=("prefill",),
        default_weight=1.0,
        doc="Prefill worker: needs to compute little of the prompt.",
        score=lambda view, context: prefix_hit(view, context, context.tiers),
        applies=lambda context: bool(context.request.hits.local or context.request.hits.store),
    ),
    Scorer(
        setting="topology",
        name="topology",
        stages=("prefill",),
        default_weight=0.1,
        doc="Prefill worker: near the decode worker, by the workers' labels.",
        score=nearness,
        applies=lambda context: bool(context.near),
    ),
    Scorer(
        setting="session",
        name="session",
        stages=("prefill",),
        default_weight=0.1,
        doc="Prefill worker: served the conversation's last turn.",
        score=stickiness,
        applies=_has_last,
    ),
    Scorer(
        setting="adapter",
        name="adapter",
        stages=("prefill", "decode", "collocated"),
        default_weight=0.7,
        doc="Any worker: is to have the request's adapter, or has it ready, so that it need not be loaded.",
        score=adapter_residency,
        applies=lambda context: bool(context.request.adapter),
    ),
)
"""All scorers, in the order in which explanations show them."""


def weights(**changes: float) -> Mapping[str, float]:
    """Weight by setting: the defaults with these changes. Raises KeyError for an unknown name."""
    found = {scorer.setting: scorer.default_weight for scorer in SCORERS}
    for name, weight in changes.items():
        if name not in found:
            raise KeyError(name)
        found[name] = weight
    return found
