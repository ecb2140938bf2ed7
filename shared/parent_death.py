"""Children that end with their parent, even when the parent is killed: Linux's parent death signal.

This file is also a launcher that asks for SIGKILL and then executes a program, because a `preexec_fn` is not safe in a
process with threads:

    python -I -S shared/parent_death.py PARENT_PID PROGRAM ARGUMENTS...

The kernel ties the signal to the *thread* that started the child: start children from a thread that lives as long as
the process (the event loop's). Only the standard library is imported, so that the launcher starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> bool:
    """Asks the kernel to kill this process when process `parent_pid`, its parent, ends.

    Returns False if the system does not support this (not Linux); ends this process at once if the parent has
    already died.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if os.getppid() != parent_pid:  # the parent died before the call took effect: no signal will come
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def command_dying_with_parent(command: list[str]) -> list[str]:
    """Wraps `command` so that its process is killed when the calling process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _main() -> None:
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid))
    os.execv(command[0], command)


if __name__ == "__main__":
    _main()
