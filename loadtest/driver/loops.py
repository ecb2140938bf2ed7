"""Open loop: on the schedule, whatever the target does. Closed loop: users who each wait for their answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from loadtest.driver.collector import Collector
from loadtest.driver.sender import Prepared, Sender, sleep_until
from loadtest.schedule import Due, Limits, Schedule
from loadtest.workloads.conversation import Conversation

_AHEAD = 64
"""Requests that are kept ready to go out."""
_NO_TIME_S = 0.005
"""So short before the next request nothing else is begun."""
_PAUSE_AFTER_FAILURE_S = 0.1
"""A user whose request failed waits so long: a target that refuses at once would otherwise be hammered."""


async def run_open_loop(schedule: Schedule, sender: Sender, collector: Collector) -> None:
    """Sends everything on time, then waits for all answers. Cancelling it ends the requests that still run."""
    remaining = iter(schedule.entries)
    ready: deque[tuple[Due, Prepared]] = deque()
    async with asyncio.TaskGroup() as running:
        while True:
            await _prepare_ahead(remaining, ready, sender, collector)
            if not ready:
                break
            due, prepared = ready.popleft()
            await sleep_until(collector, due.at_s)
            running.create_task(sender.run(due.conversation, prepared))


async def _prepare_ahead(
    remaining: Iterator[Due], ready: deque[tuple[Due, Prepared]], sender: Sender, collector: Collector
) -> None:
    """Builds and encodes prompts while there is nothing to send: for a long one that takes milliseconds."""
    while len(ready) < _AHEAD:
        if ready and ready[0][0].at_s - collector.now_s < _NO_TIME_S:
            return
        due = next(remaining, None)
        if due is None:
            return
        ready.append((due, sender.prepare(due.conversation, due.at_s)))
        await asyncio.sleep(0)  # answers that came meanwhile get their time stamps


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
