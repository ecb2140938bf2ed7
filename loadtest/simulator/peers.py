"""Other routers' placement policies, in their simplest form, and a router that binds each request as it arrives."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import count
from typing import Protocol

from loadtest.simulator.fleet import World
from loadtest.simulator.request import SimRequest
from loadtest.simulator.router import SimRouter
from loadtest.simulator.worker import Worker
from services.router.admission.controller import check_deadline
from services.router.placement.views import PlacementRequest, Pool, WorkerView
from shared.errors import Overloaded


class PeerPolicy(Protocol):
    """Chooses workers at arrival, even if their queues are long."""

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:
        """(prefill worker, decode worker)."""
        ...


class RoundRobin:
    """The next worker of each pool."""

    def __init__(self, seed: int) -> None:
        self._turns = count(seed)

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:  # noqa: ARG002 - the request does not matter
        """See `PeerPolicy`."""
        turn = next(self._turns)
        return _names(prefills)[turn % len(prefills)], _names(decodes)[turn % len(decodes)]


class LeastLoaded:
    """The prefill worker with the fewest queued prompt tokens; the decode worker with the fewest requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:  # noqa: ARG002 - the request does not matter
        """See `PeerPolicy`."""
        return (
            _least(prefills, lambda view: view.num_queued_tokens, self._random),
            _least(decodes, lambda view: view.num_requests, self._random),
        )


class SessionSticky:
    """A conversation stays on the workers of its first turn, the least loaded ones at that time."""

    def __init__(self, seed: int) -> None:
        self._first = LeastLoaded(seed)
        self._workers_by_session: dict[str, tuple[str, str]] = {}

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:
        """See `PeerPolicy`."""
        workers = self._workers_by_session.get(need.session)
        if workers is None:
            workers = self._workers_by_session[need.session] = self._first.choose(need, prefills, decodes)
        return workers


class PrefixAware:
    """The least cost in tokens: queued tokens plus the prompt's, less its cached prefix.

    The rule of KV-aware routers: overlap and load in one sum, with the exact index and exact queue lengths.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, need: PlacementRequest, prefills: Pool, decodes: Pool) -> tuple[str, str]:
        """See `PeerPolicy`."""

        def prefill_cost(view: WorkerView) -> float:
            return view.num_queued_tokens + need.num_uncached_tokens(view.name)

        def decode_cost(view: WorkerView) -> float:
            used = (view.num_total_blocks - view.num_free_blocks) * need.groups.block_size
            return used + need.num_uncached_tokens(view.name)

        return _least(prefills, prefill_cost, self._random), _least(decodes, decode_cost, self._random)


PEERS: dict[str, Callable[[int], PeerPolicy]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session-sticky": SessionSticky,
    "prefix-aware": PrefixAware,
}


def _names(pool: Pool) -> list[str]:
    return [view.name for view in pool]


def _least(pool: Pool, cost: Callable[[WorkerView], float], rng: random.Random) -> str:
    costs = [(cost(view), view.name) for view in pool]
    least = min(costs)[0]
    return rng.choice([name for value, name in costs if value == least])


class PeerRouter(SimRouter):
    """A peer's placement. With a deadline it refuses like Tandem's router, so that only placement differs.

    A prompt's first chunk asks the decode worker for room. Where there is none yet, the prompt's blocks are sent when
    there is.
    """

    def __init__(
        self, world: World, workers: Mapping[str, Worker], policy: PeerPolicy, ttft_target_s: float | None
    ) -> None:
        """`ttft_target_s` None: every request is admitted."""
        super().__init__(world, workers)
        self._policy = policy
        self._ttft_target_s = ttft_target_s

    def submit(self, request: SimRequest) -> None:
        """Chooses workers and sends, or refuses a request that would be late in its worker's queue."""
        need = self.need(request)
        prefill, decode = self._policy.choose(need, self.prefill_pool, self.decode_pool)
        view = self.prefill_pool.get(prefill)
        assert view is not None
        if self._ttft_target_s is not None:
            try:
                due_s = request.at_s + self._ttft_target_s
                check_deadline(self.world.clock.now_s, due_s, self.predictor.pool_s(view, need))
            except Overloaded:
                self.refuse(request)
                return
        self.commit(request, need, decode, prefill)
        self.ledger(prefill).sent(request.name, self.world.clock.now_s)
        self.world.clock.after(
            self.message_s, self.workers[prefill].submit, request, self.calls, self.workers[decode], None
        )

    def changed(self) -> None:
        """Does nothing: no request waits here."""
