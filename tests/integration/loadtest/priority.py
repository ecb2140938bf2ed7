"""A core of one's own on a shared machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REAL_TIME = ("chrt", "--rr", "1")
"""In front of a command; see `may_go_first`."""


def may_go_first() -> bool:
    """Whether this process may ask for real-time priority."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, policy, parameters)
    return True


@contextmanager
def first_in_line(*pids: int) -> Iterator[None]:
    """Real-time priority for all threads of some processes, where that is allowed.

    What else runs on the machine then keeps no core from them. It makes nothing faster.
    """
    before: dict[int, tuple[int, os.sched_param]] = {}
    if may_go_first():
        for pid in pids:
            for thread in map(int, os.listdir(Path("/proc", str(pid), "task"))):
                before[thread] = (os.sched_getscheduler(thread), os.sched_getparam(thread))
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for pid in pids:
            for thread in map(int, os.listdir(Path("/proc", str(pid), "task"))):
                # Threads that were born meanwhile have it too.
                policy, parameters = before.get(thread, (os.SCHED_OTHER, os.sched_param(0)))
                os.sched_setscheduler(thread, policy, parameters)
