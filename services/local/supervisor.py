"""Starts the parts of a local cluster again when they die, and ends those that hang."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.errors import TandemError

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 2.0
MAX_DEATHS = 3
"""A part that died this many times within WINDOW_S is not started again."""
WINDOW_S = 60.0
"""Time in which deaths are counted, seconds."""
FIRST_DELAY_S = 0.2
"""Pause before the first start in a window; it doubles with every further one. Seconds."""
JITTER = 0.5
"""A pause is longer by up to this share, so that parts that died together do not start together."""


class Part(Protocol):
    """One process of the cluster over all its starts. A further start has the same command, address and log."""

    name: str
    log_path: Path

    async def restart(self) -> None:
        """Starts it again and returns once it serves. Raises the TandemError that kept it from that."""
        ...

    async def ended(self) -> str:
        """Waits until the process has ended; returns how: "SIGKILL" or "exit status 1"."""
        ...

    async def answers(self) -> bool:
        """Whether it answers a probe with any status; takes at most PROBE_TIMEOUT_S."""
        ...

    def kill(self) -> None:
        """SIGKILL, where it runs."""
        ...


@dataclass(frozen=True, slots=True)
class Died:
    """A part ended without being asked to, or could not be started again."""

    name: str
    how: str
    log_path: Path
    again_in_s: float | None
    """Seconds until its next start; None where it stays away."""

    def __str__(self) -> str:
        then = "not started again" if self.again_in_s is None else f"starting again in {self.again_in_s:.1f} s"
        return f"{self.name} ended ({self.how}): {then}"


@dataclass(frozen=True, slots=True)
class Restarted:
    """A part serves again."""

    name: str
    after_s: float
    """Seconds since its death."""

    def __str__(self) -> str:
        return f"{self.name} is back after {self.after_s:.1f} s"


Change = Died | Restarted


class Supervisor:
    """Watches parts. `start()` once they serve; `close()` before they are stopped."""

    def __init__(self, on_change: Callable[[Change], None], *, restart: bool, hang_timeout_s: float) -> None:
        """`on_change` is called on the event loop; `hang_timeout_s` as in ClusterSpec. Without `restart`, deaths are
        only reported, and nothing is probed."""
        self._hang_timeout_s = hang_timeout_s
        self._on_change = on_change
        self._restart = restart
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, parts: Iterable[Part]) -> None:
        """Begins to watch."""
        self._tasks += [asyncio.create_task(self._keep(part), name=f"keep {part.name}") for part in parts]

    async def close(self) -> None:
        """Stops watching; a part that is just being started is left as it is. Twice is fine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, part: Part) -> None:
        """Starts the part again after each death; returns when it is given up."""
        restarts = Restarts(random.random)
        while True:
            how = await self._end(part)
            died_at = time.monotonic()
            while True:
                pause = restarts.on_death(time.monotonic()) if self._restart else None
                self._on_change(Died(part.name, how, part.log_path, pause))
                if pause is None:
                    return
                await asyncio.sleep(pause)
                try:
                    await part.restart()
                    break
                except (TandemError, OSError) as error:  # the latter where its log cannot be written
                    how = str(error)
            self._on_change(Restarted(part.name, time.monotonic() - died_at))

    async def _end(self, part: Part) -> str:
        """Waits for the end of a part, which it brings about where the part hangs."""
        ending = asyncio.create_task(part.ended())
        watching: list[asyncio.Task[Any]] = [ending]
        if self._restart:
            watching.append(asyncio.create_task(self._hang(part)))
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            part.kill()
            return f"{await ending} after {self._hang_timeout_s:g} s without an answer"
        finally:
            for task in watching:
                task.cancel()

    async def _hang(self, part: Part) -> None:
        """Returns once a part that has answered gives no answer for the hang's time-out."""
        has_answered, silent_s = False, 0.0
        while silent_s < self._hang_timeout_s:
            began = time.monotonic()
            answers = await part.answers()
            await asyncio.sleep(PROBE_INTERVAL_S)
            # A round counts for no longer than it may take: a launcher that was stopped itself has not asked meanwhile.
            round_s = min(time.monotonic() - began, PROBE_TIMEOUT_S + PROBE_INTERVAL_S)
            has_answered = has_answered or answers
            silent_s = silent_s + round_s if has_answered and not answers else 0.0


class Restarts:
    """The deaths of one part."""

    def __init__(self, random: Callable[[], float]) -> None:
        """`random()` gives numbers in [0, 1)."""
        self._random = random
        self._deaths: deque[float] = deque()

    def on_death(self, now: float) -> float | None:
        """Seconds until it should be started again; None to give it up. `now` is any steady clock's, in seconds."""
        self._deaths.append(now)
        while self._deaths[0] <= now - WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) >= MAX_DEATHS:
            return None
        pause = FIRST_DELAY_S * 2.0 ** (len(self._deaths) - 1)
        return pause * (1.0 + JITTER * self._random())
