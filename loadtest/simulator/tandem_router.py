"""Tandem's router: the real admission queue and placement over the simulated fleet, with late binding.

The steps are those of `services/router/dispatch/dispatcher.py`: match, queue, place, reserve, submit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from loadtest.simulator.fleet import World
from loadtest.simulator.mover import SimMover
from loadtest.simulator.request import SimRequest
from loadtest.simulator.router import SimRouter
from loadtest.simulator.worker import Worker
from services.router.admission.controller import AdmissionController, Estimate
from services.router.admission.queue import ORDERS, AdmissionQueue, QueueEntry
from services.router.placement.decision import Choice
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.split import SplitController
from services.router.placement.views import GUEST_AFTER_S, PlacementRequest, Work
from shared.errors import Overloaded
from shared.settings.common import Mode


@dataclass(frozen=True, slots=True)
class TandemConfig:
    """Settings of the router, with the real names."""

    mode: Mode = "disaggregated"
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
        workers: Mapping[str, Worker],
        config: TandemConfig,
        seed: int,
        number: int = 0,
        num_routers: int = 1,
    ) -> None:
        """The replica `number` of `num_routers`."""
        routers = [f"router-{other}" for other in range(num_routers)]
        self._queue: AdmissionQueue[_Active] = AdmissionQueue(config.queue_limit, order=ORDERS[config.order])
        self._again = False
        self.mover: SimMover | None = None
        """In mode auto alone: in the others nothing is vacated, and no worker's steps are known."""
        super().__init__(world, workers, routers[number])
        if num_routers > 1:
            for pool in (self.prefill_pool, self.decode_pool):
                for view in pool:
                    pool.update_routers(view.name, routers)
        self._config = config
        self._placement = Placement(config.placement, seed, self.predictor)
        waits = self._placement.waits_by(config.mode)
        self._admission = AdmissionController(waits, config.late_idle_share, config.late_grace)
        if config.mode == "auto":
            tpot_s = config.placement.tpot_target_s
            self.mover = SimMover.of(world, workers, self.decode_pool, self.ledger, self.split, tpot_s, self._on_done)
        self.num_waiting_max = 0
        """Longest queue so far."""

    @property
    def split(self) -> SplitController:
        """Which workers decode, in mode auto."""
        return self._placement.split

    @property
    def num_waiting(self) -> int:
        """Requests in its queue."""
        return len(self._queue)

    def submit(self, request: SimRequest) -> None:
        """Refuses a request that is predicted to be late; else queues it until workers can start it."""
        now_s, need = self.world.clock.now_s, self.need(request)
        own = _work(request, need)
        self._placement.split.demand.arrived(own, request.num_prompt_tokens, now_s)
        if self.mover is not None:
            self.mover.count()
        try:
            estimate = self._enter(request, own)
            active = _Active(request, need, estimate)
            self._queue.push(estimate.item, active)
        except Overloaded:
            self.refuse(request)
            return
        self.num_waiting_max = max(self.num_waiting_max, len(self._queue))
        self.changed()
        self._expire_later(active)

    def _enter(self, request: SimRequest, own: Work, *, first: bool = False) -> Estimate:
        deadline_s = request.at_s + self._config.ttft_target_s
        item = QueueEntry(request.name, own.tokens, request.at_s, deadline_s, num_pairs=own.pairs)
        pool = self.decode_pool if self._config.mode == "collocated" else self.prefill_pool
        num_cached = request.num_prompt_tokens - own.tokens
        return self._admission.enter(
            item,
            self.world.clock.now_s,
            self._queue,
            pool,
            num_cached=num_cached,
            load_s=self.predictor.least_load_s(pool, request.adapter),
            first=first,
        )

    def changed(self) -> None:
        """See `Dispatcher.pump`."""
        if self._queue:
            self._queue.admit(self._try_start)
        if self._queue and self.decode_pool.shared and not self._again:
            self._again = True
            self.world.clock.after(GUEST_AFTER_S, self._change_again)
        if self.mover is not None:
            self.mover.look()

    def _change_again(self) -> None:
        self._again = False
        self.changed()

    def _on_joined(self, request: SimRequest) -> None:
        super()._on_joined(request)
        if self.mover is not None:
            self.mover.begin(request)

    def _on_done(self, request: SimRequest) -> None:
        if self.mover is not None:
            self.mover.end(request)
        super()._on_done(request)

    def _expire_later(self, active: _Active) -> None:
        if not active.ended and not math.isinf(active.estimate.given_up_s):
            self.world.clock.at(active.estimate.given_up_s, self._expire, active)

    def _expire(self, active: _Active) -> None:
        if not active.ended:
            active.ended = True
            self._admission.gave_up(active.estimate, self.world.clock.now_s)
            self.refuse(active.request)
            self._queue.remove(active.request.name)
            self.changed()

    def _try_start(self, active: _Active) -> bool:
        now_s = self.world.clock.now_s
        need = replace(active.need, slack_s=active.estimate.item.deadline_s - now_s, now_s=now_s)
        choice = self._placement.choose_by(self._config.mode, need, self.decode_pool, self.prefill_pool)
        if choice is None:
            return False
        active.ended = True
        try:
            self._admission.start(active.estimate, now_s, choice.predicted_ttft_s)
        except Overloaded:
            self.refuse(active.request)
            return True
        active.request.predicted_ttft_s = choice.predicted_ttft_s
        self.commit(active.request, active.need, choice.decode, choice.prefill or "")
        decode = self.workers[choice.decode]
        if choice.prefill is None:
            self._send(decode.prefill_here, active.request, self.calls)
        else:
            self._send(decode.reserve, active.request, self.calls, partial(self._reserved, active, choice))
        return True

    def _send(self, command: Callable[..., None], *args: object) -> None:
        self.world.clock.after(self.message_s, command, *args)

    def _reserved(self, active: _Active, choice: Choice, needed: frozenset[int] | None) -> None:
        """The decode worker's answer: the prefill worker may begin, or there is no room after all."""
        request = active.request
        if needed is None:
            self.release(request)
            self.ledger(choice.decode).view.accepting = False
            try:
                active.estimate = self._enter(request, _work(request, active.need), first=True)
            except Overloaded:
                self.refuse(request)
                return
            active.ended = False
            self._queue.push_front(active.estimate.item, active)
            self._expire_later(active)
            self.changed()
            return
        self.ledger(request.decode).acknowledged(request.name)
        self.ledger(request.prefill).sent(request.name, self.world.clock.now_s)
        prefill = self.workers[request.prefill]
        self._send(prefill.submit, request, self.calls, self.workers[request.decode], needed)


def _work(request: SimRequest, need: PlacementRequest) -> Work:
    """What of its prompt is to be computed, wherever most of it lies."""
    num_cached = min(need.hits.peer, request.num_prompt_tokens - 1)
    return Work.of(request.num_prompt_tokens - num_cached, num_cached)
