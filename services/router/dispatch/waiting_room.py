"""Requests that wait for workers: how long they may, when the next one starts, and on which workers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from services.router.admission.blocked import BlockedClock, between, blocker
from services.router.admission.controller import AdmissionController, Estimate
from services.router.admission.queue import BYTES_PER_TOKEN, ORDERS, AdmissionQueue, QueueEntry
from services.router.admission.settings import AdmissionSettings, QueueSettings
from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.attempt import Attempt, Successor
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.record import RequestEvent
from services.router.dispatch.request import Request
from services.router.placement.cut_pairs import CutPairs
from services.router.placement.decision import Choice, Route
from services.router.placement.filters import num_missing_blocks
from services.router.placement.lengths import AnswerLife
from services.router.placement.policy import Placement
from services.router.placement.views import GUEST_AFTER_S, PlacementRequest, Pool, Work
from services.router.workers.fleet import Fleet
from shared.errors import Overloaded, TandemError, WorkerDied, WorkerLost
from shared.kv.groups import KVGroups
from shared.settings.common import Mode


class DispatchConfig(AdmissionSettings, QueueSettings):
    """Limits of the core: those that operators set, and those that follow."""

    mode: Mode = "disaggregated"
    """See `ModeSettings`."""
    late_idle_share: float = 0.25
    """See `may_be_late`."""
    worker_timeout_s: float = 120.0
    """Net beneath the protocol: a worker silent about a request for this long, in seconds, has lost it."""


RETRY_AFTER_S = 2.0
"""When a client should try again that was refused because a role has no worker. Seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """A request in the admission queue."""

    active: ActiveRequest
    estimate: Estimate
    assignment: asyncio.Future[Attempt]
    """Set when it is taken out of the queue: an attempt on workers, or Overloaded."""


class WaitingRoom:
    """The router's one queue, and what leaves it: attempts on workers."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        lookup: PrefixLookup,
        config: DispatchConfig,
        everyone: Callable[[], Iterable[ActiveRequest]],
    ) -> None:
        """`everyone()`: the requests that have not ended, wherever they are."""
        self._everyone = everyone
        self._fleet = fleet
        self._placement = placement
        self._lookup = lookup
        self._config = config
        self._queue: AdmissionQueue[_Queued] = AdmissionQueue(
            config.queue_limit, config.max_bytes, ORDERS[config.order], config.tenant_weights
        )
        self._predictor = placement.predictor
        self._admission = AdmissionController(
            placement.waits_by(config.mode), config.late_idle_share, config.late_grace
        )
        self._pairs = CutPairs()
        self._again: asyncio.TimerHandle | None = None
        self.blocked = BlockedClock()
        """What requests have waited for."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def check(self, request: Request) -> None:
        """Raises Overloaded where the queue cannot take the request."""
        self._queue.check(BYTES_PER_TOKEN * request.num_input_tokens)

    def check_room(self, tenant: str, priority: int, ttft_timeout_s: float) -> None:
        """See `Core`: judged as a prompt of one token would be."""
        self._queue.check()
        target_s = ttft_timeout_s or self._config.ttft_target_s
        if not self._queue or not target_s:
            return
        now = time.perf_counter()
        item = QueueEntry("", num_tokens=1, arrived_s=now, deadline_s=now + target_s, priority=priority, tenant=tenant)
        self._admission.enter(item, now, self._queue, self._prompt_pool, num_cached=0, strict=bool(ttft_timeout_s))

    def idle_room(self) -> int:
        """See `Core`."""
        if self._queue or not any(view.accepting and not view.num_queued_tokens for view in self._prompt_pool):
            return 0
        return sum(
            max(0, view.max_num_seqs // 2 - view.num_requests)
            for view in self._fleet.decode_pool
            if view.accepting and 2 * view.num_free_blocks >= view.num_total_blocks
        )

    def pump(self) -> None:
        """Gives waiting requests to workers that can start them; called whenever a worker's state changes."""
        self._queue.admit(self._try_start)
        if not self._queue:
            self.blocked.release(time.perf_counter())
        if self._queue and self._again is None and self._fleet.shared:
            self._again = asyncio.get_running_loop().call_later(GUEST_AFTER_S, self._pump_again)

    def begin(self) -> AnswerLife | None:
        """Begins to count a request's answer: the next ones are expected to be as long as those that run and those
        that have ended. None where no choice depends on their lengths: in other modes than auto."""
        return self._placement.split.demand.begin() if self._config.mode == "auto" else None

    @property
    def vacated(self) -> frozenset[str]:
        """Decode workers whose answers are to move elsewhere, for they are wanted for prompts; in mode auto alone."""
        return self._placement.split.vacated(time.perf_counter())

    @property
    def preferred(self) -> frozenset[str]:
        """Decode workers to which answers may move; none of them: to all."""
        return self._placement.split.split.decodes

    def _pump_again(self) -> None:
        """Workers of other routers' shards may have become idle meanwhile; an idle worker sends no report."""
        self._again = None
        self.pump()

    async def place(self, active: ActiveRequest, *, returning: bool) -> Attempt:
        """Waits in the queue until workers can start the request; raises Overloaded where that is not in time."""
        active.hits = await self._lookup.hits_for(active)
        active.note(RequestEvent.MATCHED)
        now = time.perf_counter()
        if self._config.mode == "auto" and not (returning or active.produced):
            self._placement.split.demand.arrived(_work(active), active.num_tokens, now)
        estimate = self._enter(active, now, returning=returning)
        attempt = None
        try:
            if not self._queue:
                attempt = self._start(active, estimate)
        except Overloaded:
            active.note(RequestEvent.LATE)
            raise
        return attempt or await self._wait(active, estimate, now, returning=returning)

    async def _wait(self, active: ActiveRequest, estimate: Estimate, now: float, *, returning: bool) -> Attempt:
        """Waits in the queue, since others are before the request or no worker can start it."""
        item = estimate.item
        wait_s = min(self._config.queue_timeout_s, max(0.0, estimate.given_up_s - now))
        queued = _Queued(active, estimate, asyncio.get_running_loop().create_future())
        held = self.blocked.read(time.perf_counter())
        waits = False
        try:
            if returning:
                self._queue.push_front(item, queued)
            else:
                self._queue.push(item, queued)
            self.pump()
            waits = not queued.assignment.done()
            if waits:
                active.note(RequestEvent.WAITED)
                await asyncio.wait((queued.assignment,), timeout=wait_s)
        except Overloaded:
            active.note(RequestEvent.FULL)
            raise
        except asyncio.CancelledError:
            given = _given(queued.assignment)
            if given is not None:  # it got workers at the moment that it left
                given.release()
                self.pump()
            raise
        finally:
            self._queue.remove(item.request_id)  # from here on no workers are assigned to it
            if waits:
                active.record.waits = between(held, self.blocked.read(time.perf_counter()))
        if not queued.assignment.done():
            raise self._gave_up(active, estimate, wait_s)
        try:
            return queued.assignment.result()
        except Overloaded:
            active.note(RequestEvent.LATE)
            raise

    def _gave_up(self, active: ActiveRequest, estimate: Estimate, wait_s: float) -> TandemError:
        """Why a request that waited was not started."""
        reason = self._fleet.not_ready_reason()
        if reason:
            return WorkerLost(reason, retry_after_s=RETRY_AFTER_S)
        self._admission.gave_up(estimate, time.perf_counter())
        active.note(RequestEvent.TIMEOUT)
        return Overloaded(f"no worker could start the request within {wait_s:.3g} s", limit=wait_s)

    def _enter(self, active: ActiveRequest, now: float, *, returning: bool) -> Estimate:
        """What is expected of the request in the queue; raises Overloaded where it would be late."""
        item = self._waiting(active)
        try:
            return self._admission.enter(
                item,
                now,
                self._queue,
                self._prompt_pool,
                num_cached=active.num_tokens - item.num_tokens,
                load_s=self._placement.predictor.least_load_s(self._prompt_pool, active.request.adapter),
                strict=bool(active.request.ttft_timeout_s),
                first=returning,
            )
        except Overloaded:
            active.note(RequestEvent.LATE)
            raise

    @property
    def _prompt_pool(self) -> Pool:
        """The role that computes prompts."""
        return self._fleet.decode_pool if self._config.mode == "collocated" else self._fleet.prefill_pool

    def _waiting(self, active: ActiveRequest) -> QueueEntry:
        """What the queue knows of a request. Once a first token is out, its deadline is met or missed for good."""
        request, num_tokens, arrived_s = active.request, active.num_tokens, active.record.ask.arrived_at
        target_s = request.ttft_timeout_s or self._config.ttft_target_s
        own = _work(active)
        return QueueEntry(
            request.request_id,
            num_tokens=own.tokens,
            arrived_s=arrived_s,
            deadline_s=arrived_s + target_s if target_s and not active.produced else math.inf,
            priority=request.priority,
            tenant=request.tenant,
            num_bytes=BYTES_PER_TOKEN * num_tokens,
            num_pairs=own.pairs,
        )

    def _try_start(self, queued: _Queued) -> bool:
        """The queue's head starts, or leaves the queue without."""
        assignment = queued.assignment
        if assignment.done():
            return True  # it gave up waiting
        try:
            attempt = self._start(queued.active, queued.estimate)
        except Overloaded as error:
            assignment.set_exception(error)
            return True
        if attempt is not None:
            assignment.set_result(attempt)
        return attempt is not None

    def _start(self, active: ActiveRequest, estimate: Estimate) -> Attempt | None:
        """Chooses workers for a request; commits to them in our view, so that the next choice sees it. None where no
        worker can start it; raises Overloaded where it would be late."""
        fleet, layout = self._fleet, self._fleet.layout
        if layout is None:
            return None
        wanted = self._wanted(active, layout.groups, self._due_s(active, estimate.item))
        choice = self._choose(wanted)
        if choice is None:
            self._note_blocked(wanted)
            return None
        self.blocked.release(wanted.now_s)
        self._admission.start(estimate, wanted.now_s, choice.predicted_ttft_s)
        decode = fleet.decodes[choice.decode]
        prefill = fleet.prefills[choice.prefill] if choice.prefill is not None else None
        if choice.prefill is not None:
            self._pairs.note_placed(choice.prefill, choice.decode, wanted.now_s)
        active.begin_attempt()
        active.record.choices.append(choice)
        active.note(RequestEvent.CHOOSING, at=wanted.now_s)
        attempt = Attempt(
            active,
            decode,
            prefill,
            self._predictor,
            self._config.worker_timeout_s,
            self._choose_successor,
            self._fleet.heard,
            self._pairs,
        )
        active.log.debug(
            "request %s: prefill on %s, decode on %s", active.wire_id, (prefill or decode).name, decode.name
        )
        view = fleet.decode_pool.get(decode.name)
        if view is not None:
            num_blocks = num_missing_blocks(view, wanted, computes=prefill is None)
        else:
            num_blocks = wanted.num_missing_blocks(decode.name)
        attempt.open(wanted.work((prefill or decode).name), num_blocks)
        return attempt

    def _choose(self, wanted: PlacementRequest) -> Choice | None:
        """Workers that can start a request now; while no prefill worker is there, one that decodes computes the prompt
        too, as far as its queue has room."""
        decodes, prefills = self._fleet.decode_pool, self._fleet.prefill_pool
        if not self._fleet.lacks_prefill:
            return self._placement.choose_by(self._config.mode, wanted, decodes, prefills)
        choice = self._placement.choose(wanted, decodes, prefills, collocated=True)
        return replace(choice, route=Route.NO_PREFILL) if choice is not None else None

    def _note_blocked(self, wanted: PlacementRequest) -> None:
        if self.blocked.is_due(wanted.now_s):
            self.blocked.hold(blocker(wanted, self._fleet.decode_pool), wanted.now_s)

    def _due_s(self, active: ActiveRequest, item: QueueEntry) -> float:
        """When the first token is due: by the deadline, or where nothing is refused by one, by the target by which
        pairs are chosen."""
        if math.isinf(item.deadline_s) and self._config.mode == "auto" and not active.produced:
            return item.arrived_s + self._placement.ttft_target_s
        return item.deadline_s

    def _wanted(self, active: ActiveRequest, groups: KVGroups, deadline_s: float) -> PlacementRequest:
        """What placement has to know of a request now."""
        request, now_s = active.request, time.perf_counter()
        return PlacementRequest(
            active.num_tokens,
            groups,
            active.hits,
            session=f"{request.tenant}/{request.session}" if request.session else "",
            slack_s=deadline_s - now_s,
            now_s=now_s,
            excluded=frozenset(active.failed_workers) | self._beside_suspects(active),
            cut=self._pairs.avoided(now_s),
            adapter=request.adapter,
            never_here=self._fleet.converts,
        )

    def _beside_suspects(self, active: ActiveRequest) -> frozenset[str]:
        """For a request that was present at a worker's death, the workers of others that were: whichever of them is the
        cause would end the next worker too, and both would seem to have."""
        if not active.is_suspect:
            return frozenset()
        others = (other.record for other in self._everyone() if other is not active and other.is_suspect)
        return frozenset(name for record in others for name in (record.prefill_worker, record.decode_worker) if name)

    def _choose_successor(
        self, active: ActiveRequest, decode: str, lost: str, error: TandemError, held: bool
    ) -> Successor | None:
        """Another prefill worker for a reservation whose own one is lost; None where the request has to begin anew.
        The loss counts as a failure of the request in either case, once. Raises Quarantined."""
        fleet = self._fleet
        near = fleet.decode_pool.get(decode)
        if near is None or fleet.layout is None or active.num_failures + 1 >= self._config.max_attempts:
            return None
        wanted = self._wanted(active, fleet.layout.groups, math.inf)
        wanted = replace(wanted, excluded=wanted.excluded | {lost} | wanted.cut.get(decode, frozenset()))
        name = self._placement.choose_prefill(wanted, fleet.prefill_pool, near.label)
        if name is None:
            return None
        if held and isinstance(error, WorkerDied):
            active.deaths.note(active.request.request_id, lost, len(active.produced))
        active.charge((lost,))
        active.log.warning("request %s: prefill on %s from now on: %s", active.wire_id, name, error)
        self._pairs.note_placed(name, decode, wanted.now_s)
        return fleet.prefills[name], wanted.work(name)


def _given(assignment: asyncio.Future[Attempt]) -> Attempt | None:
    """The attempt that was assigned, None where none was."""
    if not assignment.done() or assignment.cancelled() or assignment.exception() is not None:
        return None
    return assignment.result()


def _work(active: ActiveRequest) -> Work:
    """The work of a request's tokens behind the longest prefix that any worker holds."""
    num_tokens = active.num_tokens
    num_cached = min(active.hits.peer, num_tokens - 1)
    return Work.of(num_tokens - num_cached, num_cached)
