"""Processes of a group's ranks on this host: children of the leader, or of the member that stands for it on another."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from services.worker.group.rank_spec import RankSpec
from shared.parent_death import command_dying_with_parent

FOLLOWER = "services.worker.group"
"""The module that a follower's process runs."""
WATCH_INTERVAL_S = 0.1
STOPPED_S = 1.0
"""A rank that stays stopped for so long is lost."""
END_TIMEOUT_S = 2.0
"""Time for ranks to exit after they are asked to, seconds."""


class RankProcess:
    """One child. Made on the thread that lives as long as the process: the kernel ends the child with it."""

    def __init__(self, spec: RankSpec, module: str = FOLLOWER) -> None:
        """Starts it at once."""
        self.rank = spec.rank
        self._stopped_s = 0.0
        # Its log is this process's. stdout is this process's channel to the launcher.
        self._process = subprocess.Popen(
            command_dying_with_parent([sys.executable, "-m", module, spec.to_json()]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=spec.descriptors,
        )

    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def is_stuck(self) -> bool:
        """Whether a signal has stopped it for STOPPED_S; asked every WATCH_INTERVAL_S."""
        is_stopped = self.status() is None and _is_stopped(self._process.pid)
        self._stopped_s = self._stopped_s + WATCH_INTERVAL_S if is_stopped else 0.0
        return self._stopped_s > STOPPED_S

    def kill(self) -> None:
        """SIGKILL, where it runs."""
        self._process.kill()

    def end_by(self, deadline_s: float) -> None:
        """Waits until it has ended by itself, and kills it at that time of the monotonic clock."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process: not the want of a core, nor a debugger."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
