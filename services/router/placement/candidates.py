"""Which workers are considered: all of a small pool; of a large one the holders of a prefix and a random sample.

A sample keeps a decision's cost independent of the fleet's size. Its randomness keeps several routers, whose views are
all one step old, from choosing the same best worker at once: with the better of two random choices the longest queue
grows only with log log n (Mitzenmacher, "The power of two choices in randomized load balancing").
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

from services.router.placement.views import PlacementRequest, Pool, WorkerView


def candidates(
    pool: Pool,
    fits: Callable[[WorkerView], bool],
    request: PlacementRequest,
    favourite: str,
    limit: int,
    rng: random.Random,
) -> list[WorkerView]:
    """The workers that pass the filter `fits`, of about `limit` considered.

    Half of `limit` goes to the longest prefix holders and to `favourite`, the rest is sampled. If none of them fits,
    the first fitting worker of the whole pool is taken: a request never waits while some worker has room. Workers that
    the request excludes do not fit, unless the pool has no others.
    """
    if request.excluded and any(view.name not in request.excluded for view in pool):
        allowed, fits_allowed = request.excluded, fits

        def fits(view: WorkerView) -> bool:
            return view.name not in allowed and fits_allowed(view)

    holders = request.hits.holders
    if len(pool) <= limit:
        return [view for view in pool if fits(view)]
    chosen = {
        name: view
        for name in (*islice((name for name in holders if name in pool), limit // 2), favourite)
        if (view := pool.get(name))
    }
    for view in pool.draw(rng, max(2, limit - len(chosen))):
        chosen[view.name] = view
    found = [view for view in chosen.values() if fits(view)]
    if not found:
        found = [view for view in pool.from_random_start(rng) if fits(view)][:1]
    return found
