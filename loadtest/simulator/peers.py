"""Other routers' placement policies, in their simplest form, and a router that binds each request as it arrives."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import count
from typing import Protocol

from loadtest.simulator.decode_worker import DecodeWorker
from loadtest.simulator.fleet import World
from loadtest.simulator.prefill_worker import PrefillCalls, PrefillWorker
from loadtest.simulator.request import SimRequest
from loadtest.simulator.router import SimRouter
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
            used = (view.num_total_blocks - view.num_free_blocks) * need.block_size
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
    """A peer's placement. With a deadline it refuses like Tandem's router, so that only placement differs."""

    def __init__(
        self,
        world: World,
        prefills: Mapping[str, PrefillWorker],
        decodes: Mapping[str, DecodeWorker],
        policy: PeerPolicy,
        ttft_target_s: float | None,
    ) -> None:
        """`ttft_target_s` None: every request is admitted."""
        super().__init__(world, prefills, decodes)
        self._policy = policy
        self._ttft_target_s = ttft_target_s
        self._reserved: set[str] = set()
        self._shipped: set[str] = set()

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
                request.refused, request.refused_s = True, self.world.clock.now_s
                return
        self.commit(request, need, decode, prefill)
        self.ledger(prefill).sent(request.name, self.world.clock.now_s)
        num_held = self.decodes[decode].cache.num_hit_tokens(request.runs, request.num_prompt_tokens)
        calls = PrefillCalls(self._on_start, self.first_token, self._on_shipped)
        self.world.clock.after(self.world.spec.message_s, self.prefills[prefill].submit, request, num_held, calls)

    def changed(self) -> None:
        """Does nothing: no request waits here."""

    def _on_start(self, request: SimRequest) -> None:
        """Asks the decode worker for room when the prompt's first chunk begins."""
        self.decodes[request.decode].reserve(
            request, lambda: self._join_if_both(request, self._reserved, self._shipped)
        )

    def _on_shipped(self, request: SimRequest) -> None:
        self._join_if_both(request, self._shipped, self._reserved)

    def _join_if_both(self, request: SimRequest, here: set[str], other: set[str]) -> None:
        """Joins once both are there: reserved room, and the blocks."""
        if request.name in other:
            other.remove(request.name)
            self.decodes[request.decode].join(request, self.done)
        else:
            here.add(request.name)
