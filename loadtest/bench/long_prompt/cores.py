"""CPU affinity: workers keep the cores that the launcher gave them, everything else shares the first worker's."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil


def pin_all_but(workers: Collection[int], cores: Collection[int]) -> None:
    """Pins this process and its descendants to `cores`, save the processes of `workers` and their descendants.

    The router and the client would otherwise take turns on whichever core is free: beside an idle prefill worker on
    its core, beside a busy one on the decode worker's too, and the figure would be the machine's, not the system's.
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
                with suppress(ProcessLookupError):  # it ended meanwhile
                    os.sched_setaffinity(int(thread.name), cores)
