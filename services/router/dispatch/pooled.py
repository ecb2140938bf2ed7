"""Prompts that are read for their hidden states alone: one pass on one worker, no reservation and nothing shipped."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

from services.router.dispatch.request import Pooled, PoolRequest
from services.router.placement.views import Work
from services.router.workers.fleet import Fleet
from services.router.workers.link import Message, WorkerLink
from shared.engine.sampling_params import SamplingParams
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, TandemError, WorkerLost
from shared.rpc.convert import sampling_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

MAX_RUNNING = 64
"""Prompts on workers at once, of this router; others wait in order of arrival."""
MAX_WAITING = 8192
MAX_ATTEMPTS = 3
RETRY_AFTER_S = 1.0


class PooledCalls:
    """Chooses the worker of the prefill pool with the least to compute, or without such a pool one that decodes, and
    tries another one where that fails."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._serials = itertools.count(1)
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_active = 0
        """Prompts that wait or run."""

    async def pool(self, request: PoolRequest) -> Pooled:
        """Raises Overloaded where too many wait, WorkerLost where no worker is there, what the worker answers, and
        DeadlineExceeded where the request's time is over."""
        if self.num_active >= MAX_RUNNING + MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} prompts wait to be pooled", field="input", limit=MAX_WAITING)
        self.num_active += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(request.timeout_s or None), self._turns:
                return await self._tried(request)
        except TimeoutError:
            limit = request.timeout_s
            raise DeadlineExceeded(f"the prompt was not read within {limit:g} s", limit=limit) from None
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when none waits or runs, or after `hurry`."""
        await self._idle.wait()

    def hurry(self) -> None:
        """What still waits or runs is not waited for."""
        self._idle.set()

    async def _tried(self, request: PoolRequest) -> Pooled:
        failed: set[str] = set()
        for num_left in reversed(range(MAX_ATTEMPTS)):
            link, is_prefill = self._choose(failed)
            try:
                return await self._call(request, link, is_prefill=is_prefill)
            except TandemError as error:
                failed.add(link.name)
                if not error.retryable or not num_left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _choose(self, failed: set[str]) -> tuple[WorkerLink, bool]:
        """The worker, and whether it prefills."""
        fleet = self._fleet
        for pool, links, is_prefill in (
            (fleet.prefill_pool, fleet.prefills, True),
            (fleet.decode_pool, fleet.decodes, False),
        ):
            views = [view for view in pool if view.accepting and view.name in links]
            if not is_prefill and fleet.converts:
                continue
            fresh = [view for view in views if view.name not in failed] or views
            if fresh:
                least = min(fresh, key=lambda view: (view.num_queued_tokens, view.num_requests, view.name))
                return links[least.name], is_prefill
        raise WorkerLost(fleet.not_ready_reason() or "no worker takes prompts now", retry_after_s=RETRY_AFTER_S)

    async def _call(self, request: PoolRequest, link: WorkerLink, *, is_prefill: bool) -> Pooled:
        name = f"{request.request_id}#p{next(self._serials)}.1"
        answer: asyncio.Future[types_pb2.SequenceTokens] = asyncio.get_running_loop().create_future()
        sampling = sampling_to_proto(SamplingParams(temperature=0.0, max_tokens=1, seed=0, pooling=request.pooling))
        fields: dict[str, Any] = {
            "request_id": name,
            "num_prompt_tokens": len(request.token_ids),
            "sampling": sampling,
            "salt": request.salt,
            "tenant": request.tenant,
        }
        link.open(name, partial(_take, answer), Work.of(len(request.token_ids), 0), num_blocks=0)
        ended = False
        try:
            if is_prefill:
                link.submit(worker_pb2.Submit(**fields), request.token_ids)
            else:
                link.reserve(worker_pb2.Reserve(**fields, prefill_here=True), request.token_ids)
            tokens = await answer
            ended = True
        except TandemError:
            ended = True  # the worker has forgotten it
            raise
        finally:
            link.close(name)
            if not ended:
                link.cancel(name)
        if not tokens.pooled:
            raise InvalidRequest(f"worker {link.name} pools no hidden states", field="input")
        return Pooled(tokens.pooled, tokens.num_cached_tokens)


def _take(answer: asyncio.Future[types_pb2.SequenceTokens], message: Message | TandemError) -> None:
    """A worker's message about the prompt; a worker that decodes says first that it has reserved."""
    if answer.done():
        return
    if isinstance(message, TandemError):
        answer.set_exception(message)
    elif isinstance(message, worker_pb2.FirstToken):
        answer.set_result(message.tokens)
    elif isinstance(message, types_pb2.SequenceTokens):
        answer.set_result(message)
