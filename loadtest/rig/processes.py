"""Processes that a benchmark starts: our own modules as services, and groups of ranks that meet by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from shared.child_process import ChildProcess
from shared.errors import Internal
from shared.process_events import Ready

START_S = 180.0
END_S = 120.0


def module_process(name: str, module: str, scratch: Path, flags: Mapping[str, object]) -> ChildProcess:
    """`python -m MODULE --flag=value …`, not started yet, with its log in the folder `scratch`."""
    arguments = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    return ChildProcess(name, [sys.executable, "-m", module, *arguments], scratch / f"{name}.log")


def run_ranks(module: str, num_ranks: int, arguments: Sequence[object], descriptors: Sequence[int] = ()) -> Any:
    """Runs `python -m MODULE RANK ARGUMENT …` for each rank, all at once; returns the JSON that rank 0 prints.

    The ranks inherit the descriptors, which are closed here. Raises Internal where a rank fails.
    """
    command = [sys.executable, "-m", module]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *map(str, arguments)],
            pass_fds=descriptors,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    for descriptor in descriptors:
        os.close(descriptor)
    printed = ranks[0].communicate()[0]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise Internal(f"a rank of {num_ranks} of {module} failed")
    return json.loads(printed)


@asynccontextmanager
async def pinned(process: ChildProcess, cores: Collection[int]) -> AsyncIterator[Ready]:
    """Runs a service on these cores and kills it at the end of the block. Raises what `ChildProcess.ready` raises."""
    try:
        await process.start()
        os.sched_setaffinity(process.pid, cores)
        yield await process.ready(START_S)
    finally:
        process.kill()
        await process.stop(END_S)


def pin_all_but(workers: Collection[int]) -> None:
    """Pins this process and its descendants to the first core, except these workers and their descendants.

    Otherwise the router and the client would run on any free core: next to an idle prefill worker on its core, next to
    a busy one also on the decode worker's. The figure would then describe the machine, not the system.
    """
    core = sorted(os.sched_getaffinity(0))[:1]
    kept = set(workers)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            kept |= {child.pid for child in psutil.Process(worker).children(recursive=True)}
    me = psutil.Process()
    for pid in {me.pid, *(child.pid for child in me.children(recursive=True))} - kept:
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), core)
