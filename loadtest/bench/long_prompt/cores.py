"""CPU affinity: workers keep the cores that the launcher gave them; other processes share the first worker's core."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil


def pin_all_but(workers: Collection[int], cores: Collection[int]) -> None:
    """Pins this process and its descendants to `cores`, except the processes of `workers` and their descendants.

    Otherwise the router and the client would run on any free core: next to an idle prefill worker on its core, next to
    a busy one also on the decode worker's. The figure would then describe the machine, not the system.
    """
    kept = set(workers)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            kept |= {child.pid for child in psutil.Process(worker).children(recursive=True)}
    me = psutil.Process()
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        if pid in kept:
            continue
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), cores)
