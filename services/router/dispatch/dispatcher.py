"""A request's life in the router: match → queue → place → reserve → submit → tokens, and again on a lost worker."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.router.admission.controller import AdmissionController, Estimate
from services.router.admission.orders import ORDERS
from services.router.admission.queue import AdmissionQueue
from services.router.admission.queue_entry import BYTES_PER_TOKEN, QueueEntry
from services.router.attribution.blocked import BlockedClock, between, blocker
from services.router.attribution.ring import EndedRequests
from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.attempt import Attempt, Successor
from services.router.dispatch.config import DispatchConfig
from services.router.dispatch.ended import ended_request, refused_request
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.quarantine import Quarantine
from services.router.dispatch.states import RequestEvent
from services.router.dispatch.write_coalescer import WriteCoalescer
from services.router.metrics import RouterMetrics
from services.router.placement.decision import Choice, Decision, DecisionLog
from services.router.placement.filters import GUEST_AFTER_S
from services.router.placement.policy import Placement
from services.router.placement.views import PlacementRequest, Pool
from services.router.request import Request
from services.router.workers.fleet import Fleet
from shared.errors import (
    DeadlineExceeded,
    Internal,
    Overloaded,
    Quarantined,
    RequestRunning,
    TakenOver,
    TandemError,
    WorkerDied,
    WorkerLost,
)
from shared.telemetry.logs import failure_level


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """A request in the admission queue."""

    active: ActiveRequest
    estimate: Estimate
    assignment: asyncio.Future[Attempt]
    """Set when it is taken out of the queue: an attempt on workers, or Overloaded."""


class Dispatcher:
    """The router's core; implements `Core` for the edge."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        lookup: PrefixLookup,
        metrics: RouterMetrics,
        config: DispatchConfig,
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._lookup = lookup
        self._metrics = metrics
        self._config = config
        self._queue: AdmissionQueue[_Queued] = AdmissionQueue(
            config.queue_limit, config.queue_limit_bytes, ORDERS[config.order], config.tenant_weights
        )
        self._predictor = placement.predictor
        self._admission = AdmissionController(self._predictor, config.late_idle_share, config.late_grace)
        self._coalescer = WriteCoalescer()
        self._again: asyncio.TimerHandle | None = None
        self.decisions = DecisionLog(config.max_explained)
        """What was chosen lately, and why."""
        self.ended = EndedRequests(config.max_ended, config.targets)
        """What the status tells of requests that have ended."""
        self._blocked = BlockedClock()
        self._active: dict[str, ActiveRequest] = {}
        self._quarantine = Quarantine()
        self._serials = itertools.count(1)

    # --- Core

    def submit(self, request: Request) -> ActiveRequest:
        """Starts a request. Raises RequestRunning on a running id, Overloaded, WorkerLost where none can serve,
        Quarantined on the id of a request that was.

        A request with `resume` takes over a running one of its id and tenant, here and on the workers.
        """
        self._quarantine.check(request.tenant, request.request_id)
        older = self._active.get(request.request_id)
        if older is not None and (request.resume is None or request.tenant != older.request.tenant):
            raise RequestRunning(f"request {request.request_id!r} is running already", field="request_id")
        reason = self._fleet.not_ready_reason()
        if reason:
            raise WorkerLost(reason)
        try:
            self._queue.check(BYTES_PER_TOKEN * request.num_input_tokens)
        except Overloaded as error:
            self._metrics.refused(waited=False, cause="full")
            self.ended.add(refused_request(request, error, self._blocked.cause))
            raise
        active = ActiveRequest(request, self._coalescer, next(self._serials))
        if older is not None:
            older.take_over()
        if request.resume is not None:
            self._fleet.take_over(request.request_id, request.tenant)
        self._active[request.request_id] = active
        active.task = asyncio.create_task(self._run(active), name=f"request-{request.request_id}")
        active.task.add_done_callback(lambda task: self._end(active, task))
        return active

    def max_prompt_tokens(self) -> int:
        """Longest sequence in tokens that the connected decode workers can hold."""
        return self._fleet.max_model_len

    def not_ready_reason(self) -> str:
        """Empty when a prompt can be served now."""
        return self._fleet.not_ready_reason()

    def check_room(self, tenant: str, priority: int, ttft_timeout_s: float) -> None:
        """See `Core`: judged as a prompt of one token would be."""
        self._queue.check()
        target_s = ttft_timeout_s or self._config.ttft_target_s
        if not self._queue or not target_s:
            return
        now = time.perf_counter()
        item = QueueEntry("", num_tokens=1, arrived_s=now, deadline_s=now + target_s, priority=priority, tenant=tenant)
        self._admission.enter(item, now, self._queue, self._prompt_pool, num_cached=0, strict=bool(ttft_timeout_s))

    @property
    def num_waiting(self) -> int:
        """Requests in the admission queue."""
        return len(self._queue)

    def active(self, request_id: str) -> ActiveRequest | None:
        """The request of that id that waits or runs here."""
        return self._active.get(request_id)

    @property
    def running(self) -> Iterable[ActiveRequest]:
        """All that wait or run, oldest first."""
        return self._active.values()

    @property
    def num_active(self) -> int:
        """Requests accepted and not ended, those waiting included."""
        return len(self._active)

    def pump(self) -> None:
        """Gives waiting requests to workers that can start them; called whenever a worker's state changes."""
        self._queue.admit(self._try_start)
        if not self._queue:
            self._blocked.release(time.perf_counter())
        if self._queue and self._again is None and self._fleet.shared:
            self._again = asyncio.get_running_loop().call_later(GUEST_AFTER_S, self._pump_again)

    def _pump_again(self) -> None:
        """Workers of other routers' shards may have become idle meanwhile; an idle worker sends no report."""
        self._again = None
        self.pump()

    # --- one request

    async def _run(self, active: ActiveRequest) -> None:
        """Returns when the request is finished; raises what ended it before."""
        timeout_s = active.request.timeout_s
        try:
            async with asyncio.timeout(timeout_s or None) as deadline:
                await self._run_attempts(active)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"not done within {timeout_s:g} s", limit=timeout_s) from error

    def _end(self, active: ActiveRequest, task: asyncio.Task[None]) -> None:
        """Every request ends here, also one whose task was cancelled before its first step. A last token that came
        first decides, whatever crossed it."""
        error = None if task.cancelled() else task.exception()
        self._remember(active, error)
        if active.finished:
            active.log.debug("request %s is finished", active.request.request_id)
        elif active.taken_over:
            active.move(RequestEvent.FAIL)
            self._fail(active, TakenOver(f"request {active.request.request_id!r} goes on on another call"))
        elif error is None:
            active.move(RequestEvent.CANCEL)
            active.log.debug("request %s is cancelled", active.request.request_id)
        else:
            active.move(RequestEvent.FAIL)
            self._fail(active, error)
        if self._active.get(active.request.request_id) is active:  # else it was taken over
            del self._active[active.request.request_id]
        active.settle()

    def _remember(self, active: ActiveRequest, error: BaseException | None) -> None:
        ended = ended_request(active, error, self._blocked.cause)
        if ended is not None:
            self.ended.add(ended)

    def _fail(self, active: ActiveRequest, error: BaseException) -> None:
        request_id = active.request.request_id
        if not isinstance(error, TandemError):
            active.log.error("request %s", request_id, exc_info=error)
            error = Internal(f"{type(error).__name__}: {error}")
        if isinstance(error, Quarantined):
            self._quarantine.add(active.request.tenant, request_id, error)
        active.log.log(failure_level(error), "request %s failed: %s", request_id, error)
        active.fail(error)

    async def _run_attempts(self, active: ActiveRequest) -> None:
        """Attempts count while they bring no token: a long answer may outlive any number of workers, within its
        deadline."""
        returning = False
        while True:
            attempt = await self._place(active, returning=returning)
            try:
                await self._serve(attempt)
                return
            except Overloaded as error:
                active.note_error(error)
                # Its own state was newer than our view of it; the request keeps its place in the queue.
                attempt.refuse()
            except TandemError as error:
                active.note_error(error)
                if not attempt.is_charged:
                    active.charge(attempt.suspects)
                if attempt.died:
                    active.deaths.note(active.request.request_id, attempt.died, len(active.produced))
                if not error.retryable or active.num_failures >= self._config.max_attempts:
                    raise
                active.log.warning("request %s is placed anew: %s", active.request.request_id, error)
                if not attempt.is_charged:
                    self._metrics.retried(error)
                if active.num_output_tokens:
                    self._metrics.migrated("answer", error)
            active.move(RequestEvent.RETRY)
            if attempt.died:
                await self._fleet.heard()  # else it might go to a worker that died with the first, and seem the cause
                active.deaths.all_known()
            returning = True

    async def _place(self, active: ActiveRequest, *, returning: bool) -> Attempt:
        """Waits in the queue until workers can start the request; raises Overloaded where that is not in time."""
        request = active.request
        request_id = request.request_id
        active.hits = await self._lookup.hits_for(active)
        active.timeline.matched = now = time.perf_counter()
        estimate = self._enter(active, now, returning=returning)
        item = estimate.item
        wait_s = min(self._config.queue_timeout_s, max(0.0, estimate.given_up_s - now))
        queued = _Queued(active, estimate, asyncio.get_running_loop().create_future())
        held = self._blocked.read(now)
        waits = False
        try:
            if returning:
                self._queue.push_front(item, queued)
            else:
                self._queue.push(item, queued)
            self.pump()
            waits = not queued.assignment.done()
            if waits:
                await asyncio.wait((queued.assignment,), timeout=wait_s)
        except Overloaded:
            self._metrics.refused(waited=waits, cause="full")
            raise
        except asyncio.CancelledError:
            given = _given(queued.assignment)
            if given is not None:  # it got workers at the moment that it left
                given.release()
                self.pump()
            raise
        finally:
            self._queue.remove(request_id)  # from here on nobody assigns workers to it
            if waits:
                active.waits = between(held, self._blocked.read(time.perf_counter()))
        if not queued.assignment.done():
            raise self._gave_up(estimate, wait_s)
        try:
            attempt = queued.assignment.result()
        except Overloaded:
            self._metrics.refused(waited=waits, cause="late")
            raise
        active.timeline.placed = time.perf_counter()
        return attempt

    def _gave_up(self, estimate: Estimate, wait_s: float) -> TandemError:
        """Why a request that waited was not started."""
        reason = self._fleet.not_ready_reason()
        if reason:
            return WorkerLost(reason)
        self._admission.gave_up(estimate, time.perf_counter())
        self._metrics.refused(waited=True, cause="timeout")
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
                strict=bool(active.request.ttft_timeout_s),
                first=returning,
            )
        except Overloaded:
            self._metrics.refused(waited=returning, cause="late")
            raise

    @property
    def _prompt_pool(self) -> Pool:
        """Who computes prompts."""
        return self._fleet.decode_pool if self._config.collocated else self._fleet.prefill_pool

    def _waiting(self, active: ActiveRequest) -> QueueEntry:
        """What the queue knows of a request. Once a first token is out, its deadline is met or missed for good."""
        request = active.request
        target_s = request.ttft_timeout_s or self._config.ttft_target_s
        return QueueEntry(
            request.request_id,
            num_tokens=max(1, active.num_tokens - active.hits.peer),
            arrived_s=active.timeline.accepted,
            deadline_s=active.timeline.accepted + target_s if target_s and not active.produced else math.inf,
            priority=request.priority,
            tenant=request.tenant,
            num_bytes=BYTES_PER_TOKEN * active.num_tokens,
        )

    def _try_start(self, queued: _Queued) -> bool:
        """Chooses workers for the queue's head; commits to them in our view, so that the next choice sees it."""
        active, assignment, layout = queued.active, queued.assignment, self._fleet.layout
        if assignment.done():
            return True  # it gave up waiting
        if layout is None:
            return False
        fleet = self._fleet
        wanted = self._wanted(active, layout.block_size, queued.estimate.item.deadline_s)
        choice = self._placement.choose(
            wanted, fleet.decode_pool, fleet.prefill_pool, collocated=self._config.collocated
        )
        if choice is None:
            self._note_blocked(wanted)
            return False
        self._blocked.release(wanted.now_s)
        try:
            self._admission.start(queued.estimate, time.perf_counter(), choice.predicted_ttft_s)
        except Overloaded as error:
            assignment.set_exception(error)
            return True
        decode = fleet.decodes[choice.decode]
        prefill = fleet.prefills[choice.prefill] if choice.prefill is not None else None
        active.num_attempts += 1
        active.move(RequestEvent.PLACED)
        self._explain(active, choice)
        if active.trace is not None:
            active.trace.placed(wanted.now_s, decode, prefill, choice.route.value)
        attempt = Attempt(
            active,
            decode,
            prefill,
            self._predictor,
            self._config.worker_timeout_s,
            self._choose_successor,
            self._fleet.heard,
        )
        active.log.debug(
            "request %s: prefill on %s, decode on %s", active.wire_id, (prefill or decode).name, decode.name
        )
        attempt.open(wanted.work((prefill or decode).name), wanted.num_missing_blocks(decode.name))
        assignment.set_result(attempt)
        return True

    def _note_blocked(self, wanted: PlacementRequest) -> None:
        if self._blocked.is_due(wanted.now_s):
            self._blocked.hold(blocker(wanted, self._fleet.decode_pool), wanted.now_s)

    def _wanted(self, active: ActiveRequest, block_size: int, deadline_s: float) -> PlacementRequest:
        """What placement has to know of a request now."""
        request, now_s = active.request, time.perf_counter()
        return PlacementRequest(
            active.num_tokens,
            block_size,
            active.hits,
            session=f"{request.tenant}/{request.session}" if request.session else "",
            slack_s=deadline_s - now_s,
            now_s=now_s,
            excluded=frozenset(active.failed_workers),
        )

    def _choose_successor(
        self, active: ActiveRequest, decode: str, lost: str, error: TandemError, held: bool
    ) -> Successor | None:
        """Another prefill worker for a reservation whose own one is lost; None where the request has to begin anew.
        The loss counts as a failure of the request in either case, once. Raises Quarantined."""
        fleet = self._fleet
        near = fleet.decode_pool.get(decode)
        if near is None or fleet.layout is None or active.num_failures + 1 >= self._config.max_attempts:
            return None
        wanted = self._wanted(active, fleet.layout.block_size, math.inf)
        wanted = replace(wanted, excluded=wanted.excluded | {lost})
        name = self._placement.choose_prefill(wanted, fleet.prefill_pool, near.label)
        if name is None:
            return None
        if held and isinstance(error, WorkerDied):
            active.deaths.note(active.request.request_id, lost, len(active.produced))
        active.charge((lost,))
        active.note_error(error)
        self._metrics.retried(error)
        self._metrics.migrated("prompt", error)
        active.log.warning("request %s: prefill on %s from now on: %s", active.wire_id, name, error)
        return fleet.prefills[name], wanted.work(name)

    def _explain(self, active: ActiveRequest, choice: Choice) -> None:
        self._metrics.placed(choice.route)
        request, queue_s = active.request, time.perf_counter() - active.timeline.matched
        self.decisions.note(
            Decision(request.request_id, active.num_attempts, request.num_prompt_tokens, queue_s, choice)
        )

    async def _serve(self, attempt: Attempt) -> None:
        """One attempt on one pair of workers; frees what they hold unless the request ended there by itself."""
        try:
            await attempt.run()
        finally:
            attempt.release()
            self.pump()


def _given(assignment: asyncio.Future[Attempt]) -> Attempt | None:
    """The attempt that was assigned, None where none was."""
    if not assignment.done() or assignment.cancelled() or assignment.exception() is not None:
        return None
    return assignment.result()
