"""The steps of a request in the router: match → queue → place → reserve → submit → tokens; repeated when a worker is
lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Set

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.attempt import Attempt
from services.router.dispatch.mover import Mover
from services.router.dispatch.pooled import PooledCalls
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.quarantine import Quarantine
from services.router.dispatch.record import (
    UNOBSERVED,
    Failure,
    RecordObserver,
    RequestEvent,
    RequestRecord,
    RequestState,
)
from services.router.dispatch.request import Pooled, PoolRequest, Request
from services.router.dispatch.waiting_room import RETRY_AFTER_S, DispatchConfig, WaitingRoom
from services.router.placement.move_settings import MoveSettings
from services.router.placement.moves import MoveCause
from services.router.placement.policy import Placement
from services.router.workers.fleet import Fleet
from shared.errors import (
    Draining,
    Internal,
    Overloaded,
    Quarantined,
    RequestRunning,
    TakenOver,
    TandemError,
    WorkerLost,
)
from shared.telemetry.logs import failure_level

DRAINING = "the router is draining"
DRAIN_RETRY_AFTER_S = 1.0
"""Retry-After of a request that a draining router refuses, seconds: another replica, or its successor, serves it."""


class Dispatcher:
    """The router's core; implements `Core` for the edge."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        lookup: PrefixLookup,
        config: DispatchConfig,
        observer: RecordObserver = UNOBSERVED,
        moves: MoveSettings | None = None,
        tpot_target_s: float = 0.0,
        on_arrival: Callable[[Request, RequestRecord], None] | None = None,
    ) -> None:
        """`observer` follows the records of all requests. `moves`: when running answers move, by default as the
        settings' defaults say; `tpot_target_s` is what some are rescued for, 0 = none. `on_arrival` sees each request
        with its record before it is taken, or refused by a full queue."""
        self._fleet = fleet
        self._config = config
        self._observer = observer
        self._on_arrival = on_arrival
        self._active: dict[str, ActiveRequest] = {}
        self._room = WaitingRoom(fleet, placement, lookup, config, self._active.values)
        self._coalescer = WriteCoalescer()
        self._attempts: dict[ActiveRequest, Attempt] = {}
        self._mover = Mover(fleet, moves or MoveSettings(), tpot_target_s, self._active.values, self.move)
        self._quarantine = Quarantine()
        self._pooled = PooledCalls(fleet)
        self._serials = itertools.count(1)
        self._is_draining = False
        self._drained = asyncio.Event()
        """Set once it drains and either no request is left or the rest is not waited for."""

    # --- Core

    def submit(self, request: Request, record: RequestRecord | None = None) -> ActiveRequest:
        """Starts a request. Raises RequestRunning on a running id, Overloaded, WorkerLost where no worker can serve it
        and none is expected, Quarantined on the id of a request that was, Draining after `drain`.

        A request with `resume` takes over a running one of its id and tenant, here and on the workers.
        """
        if self._is_draining:
            raise Draining(DRAINING, retry_after_s=DRAIN_RETRY_AFTER_S)
        self._quarantine.check(request.tenant, request.request_id)
        older = self._active.get(request.request_id)
        if older is not None and (request.resume is None or request.tenant != older.request.tenant):
            raise RequestRunning(f"request {request.request_id!r} is running already", field="request_id")
        reason = self._fleet.refusal_reason()
        if reason:
            raise WorkerLost(reason, retry_after_s=RETRY_AFTER_S)
        record = record or request.new_record()
        if self._on_arrival is not None:
            self._on_arrival(request, record)
        try:
            self._room.check(request)
        except Overloaded as error:
            self._refused(record, error)
            raise
        life = self._room.begin()
        active = ActiveRequest(request, self._coalescer, next(self._serials), record, self._observer, life)
        if older is not None:
            older.stop(TakenOver(f"request {request.request_id!r} continues on another call"))
        if request.resume is not None:
            self._fleet.take_over(request.request_id, request.tenant)
        self._active[request.request_id] = active
        task = asyncio.create_task(self._run_attempts(active), name=f"request-{request.request_id}")
        task.add_done_callback(lambda task: self._end(active, task))
        active.begin(task)
        return active

    def max_prompt_tokens(self) -> int:
        """Longest sequence in tokens that the connected decode workers can hold."""
        return self._fleet.max_model_len

    def not_ready_reason(self) -> str:
        """Empty when a prompt can be served now."""
        return DRAINING if self._is_draining else self._fleet.not_ready_reason()

    def check_room(self, tenant: str, priority: int, ttft_timeout_s: float) -> None:
        """See `Core`."""
        self._room.check_room(tenant, priority, ttft_timeout_s)

    async def pool(self, request: PoolRequest) -> Pooled:
        """See `Core`."""
        if self._is_draining:
            raise Draining(DRAINING, retry_after_s=DRAIN_RETRY_AFTER_S)
        return await self._pooled.pool(request)

    def idle_room(self) -> int:
        """See `Core`."""
        return 0 if self._is_draining else self._room.idle_room()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests from now on; returns when none is left, at the latest after `timeout_s` seconds."""
        self._is_draining = True
        if not self._active:
            self._drained.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
                await self._pooled.idle()

    def hurry(self) -> None:
        """`drain` returns now, whatever still runs."""
        self._drained.set()
        self._pooled.hurry()

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
        if self._config.mode == "auto":
            self.vacate(self._room.vacated, self._room.preferred)
        else:
            self._mover.look()

    # --- moves of running answers

    def move(self, request_id: str, worker_name: str, cause: MoveCause) -> bool:
        """Has a running answer continue on another decode worker, while its client notices nothing. What becomes of it
        is in its record. False where it is not begun: the answer does not decode just now, or was present at a death
        lately, or the worker takes no new work, or prompts reach decode workers converted, which then compute none."""
        active, link = self._active.get(request_id), self._fleet.decodes.get(worker_name)
        view, layout = self._fleet.decode_pool.get(worker_name), self._fleet.layout
        if active is None or link is None or view is None or layout is None or not view.accepting:
            return False
        attempt = self._attempts.get(active)
        if attempt is None or active.state is not RequestState.DECODING or attempt.decode is link:
            return False
        if active.is_suspect or self._fleet.converts:
            return False
        active.log.debug("request %s moves from %s to %s", active.wire_id, attempt.decode.name, worker_name)
        attempt.move(link, cause, layout.groups)
        return True

    def vacate(self, workers: Set[str], preferred: Set[str] = frozenset()) -> None:
        """From now on the answers of these decode workers move to others, as far as those have room: the workers are
        wanted for prompts. An empty set takes that back. `preferred`: the workers to which answers may move; none of
        them: to all."""
        self._mover.vacated, self._mover.preferred = workers, preferred
        self._mover.look()

    # --- one request

    def _end(self, active: ActiveRequest, task: asyncio.Task[None]) -> None:
        """Every request ends here, also one whose task was cancelled before its first step. A last token that came
        first decides, whatever crossed it."""
        error = None if task.cancelled() else task.exception()
        active.count_length()
        if active.finished:
            self._expect_next_turn(active)
        else:
            self._end_early(active, active.stopped or error)
        if self._active.get(active.request.request_id) is active:  # else it was taken over
            del self._active[active.request.request_id]
        active.settle()
        if self._is_draining and not self._active:
            self._drained.set()

    def _expect_next_turn(self, active: ActiveRequest) -> None:
        """Says to the workers that had part in an answer when its session comes back, counted from now. The worker
        where it ended knows."""
        request, record = active.request, active.record
        if request.next_turn_s is not None and request.session:
            had_part = {record.prefill_worker, *(choice.decode for choice in record.choices)} - {record.decode_worker}
            self._fleet.expect_session(request.tenant, request.session, request.next_turn_s, had_part)

    def _end_early(self, active: ActiveRequest, error: BaseException | None) -> None:
        if error is not None:
            self._fail(active, error)
        else:
            active.move(RequestEvent.CANCEL)
            active.log.debug("request %s is cancelled", active.request.request_id)

    def _refused(self, record: RequestRecord, error: Overloaded) -> None:
        """A full queue did not take the request."""
        self._note_wait(record)
        record.add(RequestEvent.FULL, RequestState.QUEUED)
        self._observer.noted(record)
        record.add(RequestEvent.FAIL, RequestState.FAILED, error=Failure.of(error))
        self._observer.noted(record)

    def _note_wait(self, record: RequestRecord) -> None:
        """Notes for a request that is refused without having waited what the queue's head waits for now."""
        cause = self._room.blocked.cause
        if cause is not None and not record.waits:
            record.waits = {cause: max(time.perf_counter() - record.ask.arrived_at, 1e-9)}

    def _fail(self, active: ActiveRequest, error: BaseException) -> None:
        request_id = active.request.request_id
        if not isinstance(error, TandemError):
            active.log.error("request %s", request_id, exc_info=error)
            error = Internal(f"{type(error).__name__}: {error}")
        if isinstance(error, Quarantined):
            self._quarantine.add(active.request.tenant, request_id, error)
        active.log.log(failure_level(error), "request %s failed: %s", request_id, error)
        if isinstance(error, Overloaded):
            self._note_wait(active.record)
        active.move(RequestEvent.FAIL, error=error)
        active.fail(error)

    async def _run_attempts(self, active: ActiveRequest) -> None:
        """Returns when the request is finished; raises what ended it before.

        Attempts count while they bring no token: a long answer may outlive any number of workers, within its
        deadline."""
        returning = False
        while True:
            attempt = await self._room.place(active, returning=returning)
            try:
                await self._serve(active, attempt)
                return
            except Overloaded as error:
                # Its own state was newer than our view of it; the request keeps its place in the queue.
                attempt.refuse()
                active.move(RequestEvent.RETRY, error=error)
            except TandemError as error:
                if not attempt.is_charged:
                    active.charge(attempt.suspects)
                if attempt.died:
                    active.deaths.note(active.request.request_id, attempt.died, len(active.produced))
                if not error.retryable or active.num_failures >= self._config.max_attempts:
                    raise
                active.log.warning("request %s is placed anew: %s", active.request.request_id, error)
                active.move(RequestEvent.RETRY, ",".join(sorted(attempt.suspects)), error)
            if attempt.died:
                await self._fleet.heard()  # else it might go to a worker that died with the first, and seem the cause
                active.deaths.all_known()
            returning = True

    async def _serve(self, active: ActiveRequest, attempt: Attempt) -> None:
        """One attempt on one pair of workers; frees what they hold unless the request ended there by itself."""
        self._attempts[active] = attempt
        try:
            await attempt.run()
        finally:
            del self._attempts[active]
            attempt.release()
            self.pump()
