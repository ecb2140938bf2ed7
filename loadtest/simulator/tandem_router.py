"""Tandem's router: the real admission queue and placement over the simulated fleet, with late binding.

The steps are those of `services/router/dispatch/dispatcher.py`: match, queue, place, reserve, submit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from loadtest.simulator.decode_worker import DecodeWorker
from loadtest.simulator.fleet import World
from loadtest.simulator.prefill_worker import PrefillCalls, PrefillWorker
from loadtest.simulator.request import SimRequest
from loadtest.simulator.router import SimRouter
from services.router.admission.controller import AdmissionController, Estimate
from services.router.admission.queue import ORDERS, AdmissionQueue, QueueEntry
from services.router.placement.decision import Choice
from services.router.placement.filters import GUEST_AFTER_S
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.views import PlacementRequest
from shared.errors import Overloaded


@dataclass(frozen=True, slots=True)
class TandemConfig:
    """Settings of the router, with the real names."""

    order: str = "fcfs"
    queue_limit: int = 100_000
    ttft_target_s: float = 5.0
    late_idle_share: float = 0.25
    late_grace: float = 0.0
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass(slots=True)
class _Active:
    request: SimRequest
    need: PlacementRequest
    estimate: Estimate
    ended: bool = False
    """Dispatched, or refused."""


class TandemRouter(SimRouter):
    """One replica."""

    def __init__(
        self,
        world: World,
        prefills: Mapping[str, PrefillWorker],
        decodes: Mapping[str, DecodeWorker],
        config: TandemConfig,
        seed: int,
        number: int = 0,
        num_routers: int = 1,
    ) -> None:
        """The replica `number` of `num_routers`."""
        routers = [f"router-{other}" for other in range(num_routers)]
        self._queue: AdmissionQueue[_Active] = AdmissionQueue(config.queue_limit, order=ORDERS[config.order])
        self._again = False
        super().__init__(world, prefills, decodes, routers[number])
        if num_routers > 1:
            for pool in (self.prefill_pool, self.decode_pool):
                for view in pool:
                    pool.update_routers(view.name, routers)
        self._config = config
        self._placement = Placement(config.placement, seed, self.predictor)
        self._admission = AdmissionController(self.predictor, config.late_idle_share, config.late_grace)
        self.num_waiting_max = 0
        """Longest queue so far."""

    @property
    def num_waiting(self) -> int:
        """Requests in its queue."""
        return len(self._queue)

    def submit(self, request: SimRequest) -> None:
        """Refuses a request that is predicted to be late; else queues it until workers can start it."""
        now_s, need = self.world.clock.now_s, self.need(request)
        num_uncached = max(1, request.num_prompt_tokens - need.hits.peer)
        item = QueueEntry(request.name, num_uncached, request.at_s, request.at_s + self._config.ttft_target_s)
        try:
            pool = self.prefill_pool if self.prefills else self.decode_pool
            num_cached = request.num_prompt_tokens - num_uncached
            estimate = self._admission.enter(item, now_s, self._queue, pool, num_cached=num_cached)
            active = _Active(request, need, estimate)
            self._queue.push(estimate.item, active)
        except Overloaded:
            self._refuse(request)
            return
        self.num_waiting_max = max(self.num_waiting_max, len(self._queue))
        self.changed()
        if not math.isinf(estimate.given_up_s):
            self.world.clock.at(estimate.given_up_s, self._expire, active)

    def changed(self) -> None:
        """See `Dispatcher.pump`."""
        if self._queue:
            self._queue.admit(self._try_start)
        if self._queue and self.decode_pool.shared and not self._again:
            self._again = True
            self.world.clock.after(GUEST_AFTER_S, self._change_again)

    def _change_again(self) -> None:
        self._again = False
        self.changed()

    def _expire(self, active: _Active) -> None:
        if not active.ended:
            active.ended = True
            self._admission.gave_up(active.estimate, self.world.clock.now_s)
            self._refuse(active.request)
            self._queue.remove(active.request.name)
            self.changed()

    def _refuse(self, request: SimRequest) -> None:
        request.refused, request.refused_s = True, self.world.clock.now_s

    def _try_start(self, active: _Active) -> bool:
        now_s = self.world.clock.now_s
        need = replace(active.need, slack_s=active.estimate.item.deadline_s - now_s, now_s=now_s)
        choice = self._placement.choose(need, self.decode_pool, self.prefill_pool, collocated=not self.prefills)
        if choice is None:
            return False
        active.ended = True
        try:
            self._admission.start(active.estimate, now_s, choice.predicted_ttft_s)
        except Overloaded:
            self._refuse(active.request)
            return True
        self.commit(active.request, active.need, choice.decode, choice.prefill or "")
        self.world.clock.after(self.world.spec.message_s, self._reserve, active, choice)
        return True

    def _reserve(self, active: _Active, choice: Choice) -> None:
        """Reserves at the decode worker."""
        request, decode = active.request, self.decodes[choice.decode]
        num_held = decode.cache.num_hit_tokens(request.runs, request.num_prompt_tokens)
        if not decode.try_reserve(request):
            self.world.clock.after(self.world.spec.message_s, self._refused, active, choice)
            decode.reports.changed()
        elif choice.prefill is None:
            decode.prefill_here(request, self.first_token, self.done)
        else:
            self.world.clock.after(self.world.spec.message_s, self._reserved, request, num_held)

    def _refused(self, active: _Active, choice: Choice) -> None:
        self.release(active.request)
        self.ledger(choice.decode).view.accepting = False
        active.ended = False
        self._queue.push_front(active.estimate.item, active)
        self.changed()

    def _reserved(self, request: SimRequest, num_held: int) -> None:
        self.ledger(request.decode).acknowledged(request.name)
        self.ledger(request.prefill).sent(request.name, self.world.clock.now_s)
        calls = PrefillCalls(lambda _: None, self.first_token, self._shipped)
        prefill = self.prefills[request.prefill]
        self.world.clock.after(self.world.spec.message_s, prefill.submit, request, num_held, calls)

    def _shipped(self, request: SimRequest) -> None:
        self.decodes[request.decode].join(request, self.done)
