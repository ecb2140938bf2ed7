"""Work of a thread beside an engine's steps, in short turns.

A step's threads share its work out evenly and wait for each other, so that a step lasts as long as what was taken from
one of them. Less priority does not help: the system takes turns of milliseconds, and two of these that fall into one
step make it a fifth longer. So the thread itself stops after a millisecond, and sleeps.
"""

from __future__ import annotations

import os
import threading
import time

from shared.kernels.cpu.torch_threads import compute_in_this_thread

_TURN_S = 1e-3
"""Work after which a thread looks at the others, seconds."""
_IDLE_CORES = 0.1
"""Other threads that take no more than this count as idle, on two cores: other processes or a hypervisor may take cores
from a step, which then seems to compute little."""
_IDLE_SHARE = 1 / 3
"""Share of each further core that they may take besides."""
_SHARE = 0.075
"""Share of one core that it takes meanwhile."""
_LONGEST_SLEEP_S = 0.05
"""Longest sleep behind a piece of work, seconds, however long that was."""
_WINDOW_S = 0.01
"""The system counts the time of other threads some milliseconds late."""
_STALE_S = 0.03
"""After so long without work, others may have begun that were not there before."""


class _Turns:
    """Turns of one thread: when its turn began, and what the process's other threads have done lately. Until that is
    known they count as busy."""

    def __init__(self) -> None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most_idle = _IDLE_CORES + _IDLE_SHARE * max(0, num_cores - 2)
        self._begin()
        self._since, self._others = time.perf_counter(), _others_s()
        self._is_free = False

    def _begin(self) -> None:
        self._begun, self._begun_at = time.thread_time(), time.perf_counter()

    def end(self) -> None:
        """Ends a piece of work: where the turn is over and others are busy, the next one begins after a sleep."""
        passed = time.perf_counter() - self._begun_at
        if passed < _TURN_S:  # without asking the system, which takes ten times as long
            return
        used = time.thread_time() - self._begun
        if used < _TURN_S:
            return
        if not self._look(passed - used):
            time.sleep(min(used * (1 / _SHARE - 1), _LONGEST_SLEEP_S))
        self._begin()

    def _look(self, away_s: float) -> bool:
        """Whether the process's other threads do little; this one did not work for `away_s` of its turn."""
        now, others = time.perf_counter(), _others_s()
        if (passed := now - self._since) >= _WINDOW_S:
            self._is_free = away_s < _STALE_S and others - self._others < self._most_idle * passed
            self._since, self._others = now, others
        return self._is_free


_threads = threading.local()


def work_beside_steps() -> None:
    """Makes the calling thread one that works beside steps: its torch ops take no further threads, and `pause` stops
    it."""
    compute_in_this_thread()
    _threads.turns = _Turns()


def pause() -> None:
    """Between two pieces of work, each of a millisecond at most: sleeps where the calling thread works beside steps,
    other threads are busy, and its turn is over. Does nothing in any other thread."""
    turns: _Turns | None = getattr(_threads, "turns", None)
    if turns is not None:
        turns.end()


def _others_s() -> float:
    """Processor time of the process's other threads, seconds since its start."""
    return time.process_time() - time.thread_time()
