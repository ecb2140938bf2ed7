"""Drain of a router: accepted requests are finished, new ones are refused with a retry hint."""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.router.dispatch.record import RequestRecord
from services.router.dispatch.request import Core, Request, RunningRequest
from shared.errors import Draining

REASON = "the router is draining"
RETRY_AFTER_S = 1.0
"""Retry-After of a refused request, seconds: another replica, or this one's successor, serves it."""
_POLL_S = 0.02


class DrainableCore(Core, Protocol):
    """A core that knows how many requests it has."""

    @property
    def num_active(self) -> int:
        """Requests that wait or run."""
        ...


class Drain:
    """Implements `Core` over the router's own, and refuses requests once it drains."""

    def __init__(self, core: DrainableCore) -> None:
        self._core = core
        self.draining = False
        self._hurried = False

    async def finish(self, timeout_s: float) -> None:
        """Refuses from now on; returns when no request is left, at the latest after `timeout_s` seconds."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._core.num_active and asyncio.get_running_loop().time() < deadline:
            if self._hurried:
                return
            await asyncio.sleep(_POLL_S)

    def hurry(self) -> None:
        """`finish` returns now, whatever still runs."""
        self._hurried = True

    def submit(self, request: Request, record: RequestRecord) -> RunningRequest:
        """See `Core`. Raises Draining too."""
        if self.draining:
            raise Draining(REASON, retry_after_s=RETRY_AFTER_S)
        return self._core.submit(request, record)

    def max_prompt_tokens(self) -> int:
        """See `Core`."""
        return self._core.max_prompt_tokens()

    def check_room(self, tenant: str, priority: int, ttft_timeout_s: float) -> None:
        """See `Core`."""
        self._core.check_room(tenant, priority, ttft_timeout_s)

    def not_ready_reason(self) -> str:
        """See `Core`."""
        return REASON if self.draining else self._core.not_ready_reason()
