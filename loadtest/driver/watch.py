"""Watches a run: stops it for the user or if the target is gone, and shows its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from loadtest.driver.collector import Collector

PROGRESS_EVERY_S = 0.5
_LOOK_EVERY_S = 0.25


async def run_until_stopped(
    load: Coroutine[None, None, None],
    stop: asyncio.Event,
    collector: Collector,
    give_up_s: float,
    on_progress: Callable[[Collector], None] | None,
) -> str:
    """Runs `load` to its end or until it is stopped; returns the reason, empty if it came to its end.

    It is stopped by `stop`, and if no connection to the target could be made for `give_up_s` (0 = never).
    """
    running = asyncio.create_task(load)
    stopping = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(_until_target_gone(collector, give_up_s))
    showing = asyncio.create_task(_show(collector, on_progress))
    try:
        await asyncio.wait({running, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            return ""
        return watching.result() if watching.done() else "stopped by the user"
    finally:
        for task in (running, stopping, watching, showing):
            task.cancel()
        await asyncio.gather(running, stopping, watching, showing, return_exceptions=True)


async def _until_target_gone(collector: Collector, give_up_s: float) -> str:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        since_s = collector.unreachable_since_s
        if give_up_s and since_s is not None and collector.now_s - since_s >= give_up_s:
            reason = collector.last_failure.message if collector.last_failure is not None else "no connection"
            return f"the target was gone from {since_s:.1f} s on: {reason}"


async def _show(collector: Collector, on_progress: Callable[[Collector], None] | None) -> None:
    while on_progress is not None:
        on_progress(collector)
        await asyncio.sleep(PROGRESS_EVERY_S)
