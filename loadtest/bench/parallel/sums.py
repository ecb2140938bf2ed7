"""Sums over ranks: shared memory beside gloo and beside copying the same bytes once.

`python -m loadtest.bench.parallel.sums KIND PLACE RANK SIZE REPEATS` is one rank of a measured group. KIND is
shared-memory, with an inherited descriptor as its PLACE, or gloo, with a new file's path. Rank 0 prints a JSON object:
bytes → median seconds of a sum.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore

from loadtest.rig.results import Result
from shared.collectives.cpu_group import CpuGroup, group_bytes, shared_memory
from shared.errors import Internal
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load
from shared.sizes import size as shown

SIZES = tuple(4096 << (2 * step) for step in range(7))
"""4 KiB to 16 MiB."""
_LIMIT_S = 60.0
"""gloo's: a shared machine may pause a rank for longer than a worker's limit."""


class Gloo:
    """torch's own all-reduce, which promises less than ours: not the same bits on all ranks."""

    def __init__(self, place: str, rank: int, size: int) -> None:
        store = FileStore(place, size)
        self._group: Any = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=_LIMIT_S))

    def all_reduce(self, x: Tensor) -> None:
        """Replaces `x` by the sum."""
        self._group.allreduce([x]).wait()


def join(kind: str, place: str, rank: int, size: int) -> Gloo | CpuGroup:
    """The group, once all ranks have joined."""
    if kind == "gloo":
        return Gloo(place, rank, size)
    group = CpuGroup(load(choose()[1]), int(place), rank, size, stuck_s=_LIMIT_S)
    group.meet()
    return group


def sum_s(group: Gloo | CpuGroup, num_bytes: int, repeats: int) -> float:
    """Median seconds of one sum of so many bytes."""
    x = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        group.all_reduce(x)
        times.append(perf_counter() - begin)
    return median(times)


def main() -> None:
    """Measures every size, the smaller ones more often."""
    kind, place, *numbers = sys.argv[1:]
    rank, size, repeats = map(int, numbers)
    torch.set_num_threads(1)
    group = join(kind, place, rank, size)
    found = {num_bytes: sum_s(group, num_bytes, max(5, repeats * SIZES[2] // num_bytes)) for num_bytes in SIZES}
    if rank == 0:
        print(json.dumps(found), flush=True)
    group.all_reduce(torch.zeros(1))
    if isinstance(group, CpuGroup):
        group.close()


GOAL_BYTES, GOAL_RATIO = 64 << 10, 5.0
"""At this size, sums through shared memory are to take a fifth of gloo's time."""


def measure_sums(num_ranks: int, pairs: int, repeats: int) -> list[Result]:
    """Each size's median over `pairs` runs of both, one after the other."""
    runs = [(_run("shared-memory", num_ranks, repeats), _run("gloo", num_ranks, repeats)) for _ in range(pairs)]
    results = []
    for num_bytes in SIZES:
        ours = median(own[num_bytes] for own, _ in runs)
        ratio = median(gloo[num_bytes] / own[num_bytes] for own, gloo in runs)
        copied = _copy_s(num_bytes)
        name = f"sum of {shown(num_bytes)} over {num_ranks} ranks"
        results.append(Result(name, ours * 1e6, "us", copied * 1e6, copied / ours, "gloo", ratio))
    return results


def _run(kind: str, num_ranks: int, repeats: int) -> dict[int, float]:
    """Bytes → seconds. Raises Internal where a rank fails."""
    with tempfile.TemporaryDirectory(prefix="tandem-parallel-") as folder:
        descriptor = shared_memory(group_bytes(load(choose()[1]), num_ranks))
        place = str(Path(folder, "store")) if kind == "gloo" else str(descriptor)
        module = "loadtest.bench.parallel.sums"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, kind, place, str(rank), str(num_ranks), str(repeats)],
                pass_fds=[descriptor],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        os.close(descriptor)
        printed = ranks[0].communicate()[0]
        if any(rank.wait() for rank in ranks):
            raise Internal(f"a rank of {num_ranks} failed to add up by {kind}")
    return {int(num_bytes): seconds for num_bytes, seconds in json.loads(printed).items()}


def _copy_s(num_bytes: int) -> float:
    """Median seconds of one copy by one thread."""
    source, target, times = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4), []
    for _ in range(50):
        begin = perf_counter()
        target.copy_(source)
        times.append(perf_counter() - begin)
    return median(times)


if __name__ == "__main__":
    main()
