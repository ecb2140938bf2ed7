"""A router that sends every request to workers as it arrives (early binding); it waits in the worker's own queue."""

from __future__ import annotations

from collections.abc import Mapping

from loadtest.simulator.decode_worker import DecodeWorker
from loadtest.simulator.fleet import World
from loadtest.simulator.peers import PeerPolicy
from loadtest.simulator.prefill_worker import PrefillCalls, PrefillWorker
from loadtest.simulator.request import SimRequest
from loadtest.simulator.router import SimRouter
from services.router.admission.deadline import check_deadline
from shared.errors import Overloaded


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
