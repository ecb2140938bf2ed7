"""A request's life in the router: match → queue → place → reserve → submit → tokens, and again on a lost worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from services.router.attribution.ring import EndedRequests
from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.attempt import Attempt
from services.router.dispatch.config import DispatchConfig
from services.router.dispatch.ended import ended_request, refused_request
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.quarantine import Quarantine
from services.router.dispatch.states import RequestEvent
from services.router.dispatch.waiting_room import WaitingRoom
from services.router.dispatch.write_coalescer import WriteCoalescer
from services.router.metrics import RouterMetrics
from services.router.placement.decision import DecisionLog
from services.router.placement.policy import Placement
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
    WorkerLost,
)
from shared.telemetry.logs import failure_level


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
        self._metrics = metrics
        self._config = config
        self._room = WaitingRoom(fleet, placement, lookup, metrics, config)
        self._coalescer = WriteCoalescer()
        self.ended = EndedRequests(config.max_ended, config.targets)
        """What the status tells of requests that have ended."""
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
            self._room.check(request)
        except Overloaded as error:
            self._metrics.refused(waited=False, cause="full")
            self.ended.add(refused_request(request, error, self._room.blocked.cause))
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
        """See `Core`."""
        self._room.check_room(tenant, priority, ttft_timeout_s)

    @property
    def decisions(self) -> DecisionLog:
        """What was chosen lately, and why."""
        return self._room.decisions

    @property
    def num_waiting(self) -> int:
        """Requests in the admission queue."""
        return self._room.num_waiting

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
        self._room.pump()

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
        ended = ended_request(active, error, self._room.blocked.cause)
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
            attempt = await self._room.place(active, returning=returning)
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

    async def _serve(self, attempt: Attempt) -> None:
        """One attempt on one pair of workers; frees what they hold unless the request ended there by itself."""
        try:
            await attempt.run()
        finally:
            attempt.release()
            self.pump()
