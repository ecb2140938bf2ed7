"""Filters: which workers are considered, and which can take a request at all. Scorers compare those that pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from services.router.placement.views import PlacementRequest, Pool, Tier, WorkerView

Filter = Callable[[WorkerView, PlacementRequest], bool]
"""Whether the worker can take the request now."""


def num_missing_blocks(view: WorkerView, request: PlacementRequest, *, computes: bool) -> int:
    """Blocks that a worker lacks for a request. `computes`: as for `can_hold`."""
    return request.num_missing_blocks(view.name, step_tokens=max(1, view.max_step_tokens) if computes else 1)


def can_hold(view: WorkerView, request: PlacementRequest, *, computes: bool = False) -> bool:
    """A free batch slot, and free blocks for what it does not hold yet plus one of each KV group for each running
    request. `computes`: its prompt is computed there, in steps, of which each takes blocks behind the windows too."""
    missing = num_missing_blocks(view, request, computes=computes)
    return (
        view.accepting
        and view.num_requests < view.max_num_seqs
        and missing + view.num_requests * request.groups.size <= view.num_free_blocks
    )


def has_queue_room(view: WorkerView, request: PlacementRequest, max_queued_tokens: int, patience: float = 1.0) -> bool:
    """An idle worker always; a busy one while queued < `max_queued_tokens` + `patience` · hit tokens.

    A worker that holds part of the prompt may have a longer queue. With patience 1 the allowance is exactly the tokens
    that need no computing: the client waits no longer than for a computation elsewhere. With more, clients wait so that
    the fleet computes less; the TTFT target bounds the wait.

    A worker of another router's shard, if other routers had prompts there in the last `guest_after_s`, is taken only
    for a prompt of which it holds much: queued < `patience` · hit tokens − `max_queued_tokens`.
    """
    if not view.accepting:
        return False
    queued = view.num_queued_tokens
    if view.in_shard or request.now_s - view.exclusive_since_s >= view.guest_after_s:
        return queued == 0 or queued < patience * request.num_hit_tokens(view.name) + max_queued_tokens
    return queued < patience * request.num_hit_tokens(view.name) - max_queued_tokens


def has_adapter_room(view: WorkerView, adapter: str) -> bool:
    """Whether a request's adapter is ready there or being loaded, or can be loaded without waiting for the end of
    others' requests."""
    is_there = view.adapters.get(adapter) is Tier.READY or adapter in view.loading_adapters
    return is_there or view.adapter_room is None or view.adapter_room > 0


def candidates(
    pool: Pool,
    fits: Filter,
    request: PlacementRequest,
    favourites: Sequence[str],
    limit: int,
    rng: random.Random,
    drawn: Sequence[WorkerView] | None = None,
) -> list[WorkerView]:
    """The workers that pass the filter `fits`, of about `limit` considered.

    A sample keeps a decision's cost independent of the fleet's size. Its randomness keeps several routers, whose views
    are all one step old, from choosing the same best worker at once: with the better of two random choices the longest
    queue grows only with log log n (Mitzenmacher, "The power of two choices in randomized load balancing").

    Half of `limit` goes to the longest prefix holders and to `favourites`, the rest is sampled. If none of them fits,
    the first fitting worker of the whole pool is taken: a request never waits while some worker has room. Workers that
    the request excludes do not fit, unless no others take requests. Those that do not know its adapter never fit; those
    that have no room for it are considered where all others lack it too. `drawn`: the sample; else it is drawn here.
    """
    others: Iterable[WorkerView] = pool
    if request.adapter:
        fits_base = fits
        others = [view for view in pool if request.adapter in view.adapters]

        def fits(view: WorkerView, request: PlacementRequest) -> bool:
            return request.adapter in view.adapters and fits_base(view, request)

    if request.excluded and any(view.accepting and view.name not in request.excluded for view in others):
        allowed, fits_allowed = request.excluded, fits

        def fits(view: WorkerView, request: PlacementRequest) -> bool:
            return view.name not in allowed and fits_allowed(view, request)

    found = _sampled(pool, fits, request, favourites, limit, rng, drawn)
    if not request.adapter:
        return found
    return [view for view in found if has_adapter_room(view, request.adapter)] or found


def _sampled(
    pool: Pool,
    fits: Filter,
    request: PlacementRequest,
    favourites: Sequence[str],
    limit: int,
    rng: random.Random,
    drawn: Sequence[WorkerView] | None,
) -> list[WorkerView]:
    holders = request.hits.holders
    if len(pool) <= limit:
        return [view for view in pool if fits(view, request)]
    chosen = {
        name: view
        for name in (*islice((name for name in holders if name in pool), limit // 2), *favourites)
        if (view := pool.get(name))
    }
    for view in pool.draw(rng, max(2, limit - len(chosen))) if drawn is None else drawn[: max(2, limit - len(chosen))]:
        chosen[view.name] = view
    found = [view for view in chosen.values() if fits(view, request)]
    if not found:
        found = list(islice((view for view in pool.from_random_start(rng) if fits(view, request)), 1))
    return found
