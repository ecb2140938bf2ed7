"""Open loop: requests on schedule, independent of the target. Closed loop: users who wait for their own answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from loadtest.driver.collector import Collector
from loadtest.driver.sender import Prepared, Sender, sleep_until
from loadtest.schedule import Due, Limits, Schedule
from loadtest.workloads.conversation import Conversation

_AHEAD = 64
"""Requests prepared in advance."""
_AHEAD_TOKENS = 1_000_000
"""Prompt tokens prepared before the clock starts; about a second of work and 10 MB."""
_NO_TIME_S = 0.005
"""No other work starts this shortly before the next request. Seconds."""
_PAUSE_AFTER_FAILURE_S = 0.1
"""Pause of a user after a failed request, so that a target that refuses at once is not flooded. Seconds."""


class OpenLoop:
    """Sends the requests of a schedule."""

    def __init__(self, schedule: Schedule, sender: Sender, collector: Collector) -> None:
        self._remaining = iter(schedule.entries)
        self._ready: deque[tuple[Due, Prepared]] = deque()
        self._sender = sender
        self._collector = collector

    def prepare(self) -> None:
        """Builds and encodes the first prompts; called before the clock starts, not to delay the schedule."""
        num_tokens = 0
        while num_tokens < _AHEAD_TOKENS and (prepared := self._prepare_next()) is not None:
            num_tokens += prepared.record.num_prompt_tokens

    async def run(self) -> None:
        """Sends everything on time, then waits for all answers. Cancelling it cancels running requests."""
        async with asyncio.TaskGroup() as running:
            while True:
                await self._prepare_ahead()
                if not self._ready:
                    break
                due, prepared = self._ready.popleft()
                await sleep_until(self._collector, due.at_s)
                running.create_task(self._sender.run(due.conversation, prepared))

    async def _prepare_ahead(self) -> None:
        """Prepares further prompts while there is nothing to send: a long one takes milliseconds."""
        while len(self._ready) < _AHEAD:
            if self._ready and self._ready[0][0].at_s - self._collector.now_s < _NO_TIME_S:
                return
            if self._prepare_next() is None:
                return
            await asyncio.sleep(0)  # lets answers get their time stamps

    def _prepare_next(self) -> Prepared | None:
        due = next(self._remaining, None)
        if due is None:
            return None
        prepared = self._sender.prepare(due.conversation, due.at_s)
        self._ready.append((due, prepared))
        return prepared


async def run_closed_loop(
    conversations: Iterator[Conversation], concurrency: int, limits: Limits, sender: Sender, collector: Collector
) -> None:
    """Keeps `concurrency` users busy until the limits are reached or the workload ends, then waits for all answers."""
    num_requests = 0

    def take() -> Conversation | None:
        nonlocal num_requests
        if limits.duration_s is not None and collector.now_s >= limits.duration_s:
            return None
        if limits.num_requests is not None and num_requests >= limits.num_requests:
            return None
        conversation = next(conversations, None)
        num_requests += len(conversation.turns) if conversation is not None else 0
        return conversation

    async def user() -> None:
        while (conversation := take()) is not None:
            answered = await sender.run(conversation, sender.prepare(conversation, None))
            if not answered:
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())
