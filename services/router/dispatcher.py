"""A request's life in the router: match → queue → place → reserve → submit → tokens, and again on a lost worker."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from services.router.active_request import ActiveRequest, Assignment
from services.router.admission.queue import AdmissionQueue
from services.router.fleet import Fleet
from services.router.hand_off import HandOff
from services.router.metrics import RouterMetrics
from services.router.placement.policy import Placement
from services.router.placement.views import Need
from services.router.prefix_lookup import PrefixLookup
from services.router.request import Request
from shared.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Overloaded,
    TandemError,
    WorkerLost,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Limits of the core."""

    collocated: bool = False
    queue_limit: int = 1024
    queue_timeout_s: float = 60.0
    max_attempts: int = 3
    """Times a request is placed anew after a worker was lost or a transfer failed."""
    worker_timeout_s: float = 120.0
    """Net beneath the protocol: a worker that says nothing about a request for so long has lost it."""


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
        self._queue: AdmissionQueue[ActiveRequest] = AdmissionQueue(config.queue_limit)
        self._active: dict[str, ActiveRequest] = {}

    # --- Core

    def submit(self, request: Request) -> ActiveRequest:
        """Starts a request. Raises InvalidRequest on a running id, Overloaded, WorkerLost where none can serve."""
        if request.request_id in self._active:
            raise InvalidRequest(f"request {request.request_id!r} is running already", field="request_id")
        reason = self._fleet.not_ready_reason()
        if reason:
            raise WorkerLost(reason)
        if len(self._queue) >= self._config.queue_limit:
            raise Overloaded(
                f"{len(self._queue)} requests wait already, the limit is {self._config.queue_limit}",
                field="queue",
                limit=self._config.queue_limit,
            )
        active = ActiveRequest(request)
        self._active[request.request_id] = active
        active.task = asyncio.create_task(self._run(active), name=f"request-{request.request_id}")
        return active

    def max_prompt_tokens(self) -> int:
        """Longest sequence in tokens that the connected decode workers can hold."""
        return self._fleet.max_model_len

    def not_ready_reason(self) -> str:
        """Empty when a prompt can be served now."""
        return self._fleet.not_ready_reason()

    @property
    def num_waiting(self) -> int:
        """Requests in the admission queue."""
        return len(self._queue)

    @property
    def num_active(self) -> int:
        """Requests accepted and not ended, those waiting included."""
        return len(self._active)

    def pump(self) -> None:
        """Gives waiting requests to workers that can start them; called whenever a worker's state changes."""
        self._queue.admit(self._try_start)

    # --- one request

    async def _run(self, active: ActiveRequest) -> None:
        request = active.request
        try:
            async with asyncio.timeout(request.timeout_s or None):
                await self._run_attempts(active)
            self._metrics.finished(active)
        except TimeoutError:
            self._fail(active, DeadlineExceeded(f"not done within {request.timeout_s:g} s", limit=request.timeout_s))
        except TandemError as error:
            self._fail(active, error)
        except asyncio.CancelledError:
            self._metrics.cancelled()
            raise
        except Exception as error:
            logger.exception("request %s", request.request_id)
            self._fail(active, Internal(f"{type(error).__name__}: {error}"))
        finally:
            del self._active[request.request_id]

    def _fail(self, active: ActiveRequest, error: TandemError) -> None:
        self._metrics.failed(error)
        active.fail(error)

    async def _run_attempts(self, active: ActiveRequest) -> None:
        failures = 0
        returning = False
        while True:
            assignment = await self._place(active, returning=returning)
            try:
                await self._serve(active, assignment)
                return
            except Overloaded:
                # Its own state was newer than our view of it; the request keeps its place in the queue.
                assignment.decode.refused = True
            except TandemError as error:
                failures += 1
                if not error.retryable or failures >= self._config.max_attempts:
                    raise
                logger.warning("request %s is placed anew: %s", active.request.request_id, error)
                self._metrics.retried(error)
            returning = True

    async def _place(self, active: ActiveRequest, *, returning: bool) -> Assignment:
        """Waits in the queue until workers can start the request."""
        request_id = active.request.request_id
        active.hits = await self._lookup.find(active.token_ids, active.request.tenant)
        active.timeline.matched = time.perf_counter()
        active.assignment = asyncio.get_running_loop().create_future()
        try:
            if returning:
                self._queue.push_front(request_id, active)
            else:
                self._queue.push(request_id, active)
            self.pump()
            async with asyncio.timeout(self._config.queue_timeout_s):
                assignment = await active.assignment
        except TimeoutError:
            reason = self._fleet.not_ready_reason()
            if reason:
                raise WorkerLost(reason) from None
            raise Overloaded(
                f"no worker could start the request within {self._config.queue_timeout_s:g} s",
                field="queue_timeout_s",
                limit=self._config.queue_timeout_s,
            ) from None
        finally:
            self._queue.remove(request_id)
            active.assignment = None
        active.timeline.placed = time.perf_counter()
        return assignment

    def _try_start(self, active: ActiveRequest) -> bool:
        """Chooses workers for the queue's head; commits to them in our view, so that the next choice sees it."""
        future = active.assignment
        if future is None or future.done():
            return True  # it gave up waiting
        if self._fleet.layout is None:
            return False
        need = Need(active.request.num_prompt_tokens + len(active.produced), self._fleet.layout.block_size)
        fleet = self._fleet
        choice = self._placement.choose(
            need,
            fleet.views(fleet.decodes, active.hits.tokens),
            fleet.views(fleet.prefills, active.hits.tokens),
            collocated=self._config.collocated,
        )
        if choice is None:
            return False
        decode = fleet.decodes[choice.decode]
        prefill = fleet.prefills[choice.prefill] if choice.prefill is not None else None
        computing = prefill or decode
        uncached = max(1, need.num_tokens - active.hits.tokens.get(computing.name, 0))
        decode.num_committed_blocks += need.num_blocks
        computing.num_committed_tokens += uncached
        active.begin_attempt()
        for link in (decode, prefill):
            if link is not None:
                link.open(active.wire_id, active.inbox)
        future.set_result(Assignment(decode, prefill, uncached))
        return True

    async def _serve(self, active: ActiveRequest, assignment: Assignment) -> None:
        """One attempt on one pair of workers; frees what they hold unless the request ended there by itself."""
        hand_off = HandOff(active, assignment, self._config.worker_timeout_s)
        try:
            await hand_off.run()
        finally:
            hand_off.release()
            self.pump()
