"""Responses that are computed while their client is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from services.router.edge.http.errors import as_tandem_error
from services.router.edge.http.responses.shelf import LEASE_S, KeptResponse, Shelf
from shared.errors import InvalidRequest, Overloaded, RequestRunning, StoreUnavailable, TandemError, WorkerLost
from shared.records.records import Unless
from shared.tasks import end_task

logger = logging.getLogger(__name__)
RENEW_S = LEASE_S / 5


class Background:
    """Tasks of this router. A response belongs to the router that holds its lease: deleting that is how any router
    cancels it, and one without a lease that has not ended was lost with its router."""

    def __init__(self, shelf: Shelf, max_running: int, renew_s: float = RENEW_S) -> None:
        """`renew_s`: seconds between two looks at a lease."""
        self._shelf = shelf
        self._max_running = max_running
        self._renew_s = renew_s
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}  # by tenant and response
        self._beginning: set[tuple[str, str]] = set()
        self._closing = False

    async def begin(self, tenant: str, begun: KeptResponse, compute: Callable[[bytes], Awaitable[None]]) -> None:
        """Keeps a response that has begun, and computes it: `compute` is given the record's stamp, and keeps the
        response that has ended in its place. Raises Overloaded where too many run, RequestRunning where this one
        does."""
        if len(self._running) + len(self._beginning) >= self._max_running:
            limit = self._max_running
            raise Overloaded(f"{limit} responses run in the background", field="background", limit=limit)
        place = (tenant, begun.id)
        if place in self._running or place in self._beginning:
            raise _already(begun)
        self._beginning.add(place)
        try:
            stamp = await self._kept(tenant, begun)
            task = asyncio.create_task(
                self._run(tenant, replace(begun, stamp=stamp), compute), name=f"background {begun.id}"
            )
            self._running[place] = task
        finally:
            self._beginning.discard(place)
        task.add_done_callback(lambda _: self._running.pop(place, None))

    async def look(self, tenant: str, response_id: str) -> KeptResponse:
        """The response as it is now: failed, where its router was lost. Raises NotFound."""
        while True:
            kept = await self._shelf.response(tenant, response_id)
            if not kept.is_running or await self._shelf.is_leased(tenant, response_id):
                return kept
            lost = failed(kept, WorkerLost("the router that computed the response is gone"))
            if await self._shelf.keep(tenant, lost, Unless(changed_from=kept.stamp)):
                return lost

    async def cancel(self, tenant: str, response_id: str) -> KeptResponse:
        """The cancelled response, or the one that had ended before. Raises NotFound, and InvalidRequest for one that is
        not in the background."""
        while True:
            kept = await self.look(tenant, response_id)
            if not kept.body.get("background"):
                raise InvalidRequest("only a response with background true can be cancelled", field="response_id")
            if not kept.is_running:
                return kept
            ended = replace(kept, body={**kept.body, "status": "cancelled"})
            if await self._shelf.keep(tenant, ended, Unless(changed_from=kept.stamp)):
                break
        task = self._running.get((tenant, response_id))
        if task is not None:
            task.cancel()
        await self._shelf.release(tenant, response_id)
        return ended

    async def close(self) -> None:
        """Ends all; what still ran has failed."""
        self._closing = True
        for task in list(self._running.values()):
            await end_task(task)

    async def _kept(self, tenant: str, begun: KeptResponse) -> bytes:
        """Takes the lease and keeps the response; its stamp. Leaves no lease where it raises."""
        if not await self._shelf.lease(tenant, begun.id):
            raise _already(begun)
        try:
            stamp = await self._shelf.keep(tenant, begun)
        except BaseException:
            with contextlib.suppress(StoreUnavailable):  # it ends by itself
                await self._shelf.release(tenant, begun.id)
            raise
        assert stamp is not None
        return stamp

    async def _run(self, tenant: str, begun: KeptResponse, compute: Callable[[bytes], Awaitable[None]]) -> None:
        this = asyncio.current_task()
        assert this is not None
        renewing = asyncio.create_task(self._renew(tenant, begun.id, this))
        try:
            await compute(begun.stamp)
        except asyncio.CancelledError:
            if self._closing:
                await self._fail(tenant, begun, WorkerLost("the router is shutting down"))
                raise
        except Exception as error:
            await self._fail(tenant, begun, as_tandem_error(error, begun.id))
        finally:
            await end_task(renewing)
            with contextlib.suppress(StoreUnavailable):  # it ends by itself
                await self._shelf.release(tenant, begun.id)

    async def _fail(self, tenant: str, begun: KeptResponse, error: TandemError) -> None:
        try:
            await self._shelf.keep(tenant, failed(begun, error), Unless(changed_from=begun.stamp))
        except TandemError as unkept:
            logger.warning("response %s failed (%s), and that was not kept: %s", begun.id, error, unkept)

    async def _renew(self, tenant: str, response_id: str, task: asyncio.Task[None]) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            with contextlib.suppress(StoreUnavailable):  # it may come back before the lease ends
                if not await self._shelf.renew(tenant, response_id):
                    task.cancel()
                    return


def _already(begun: KeptResponse) -> RequestRunning:
    return RequestRunning(f"response {begun.id!r} is running already", field="request_id")


def failed(response: KeptResponse, error: TandemError) -> KeptResponse:
    """The response as one that ended with this error."""
    code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
    body: dict[str, Any] = {**response.body, "status": "failed", "error": {"code": code, "message": error.message}}
    return replace(response, body=body)
