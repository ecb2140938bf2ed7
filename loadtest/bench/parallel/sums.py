"""Sums over ranks: shared memory beside gloo and beside copying the same bytes once.

`python -m loadtest.bench.parallel.sums RANK SIZE REPEATS KIND PLACE` is one rank of a measured group. KIND is
shared-memory, with an inherited descriptor as its PLACE, or gloo, with a new file's path. Rank 0 prints a JSON object:
bytes → median seconds of a sum.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore

from loadtest.rig.measure import median_ratio, median_s, turns
from loadtest.rig.processes import run_ranks
from loadtest.rig.results import Result
from shared.collectives.cpu_group import CpuGroup, group_bytes, shared_memory
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
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


def main() -> None:
    """Measures every size, the smaller ones more often."""
    rank, size, repeats = map(int, sys.argv[1:4])
    kind, place = sys.argv[4:]
    torch.set_num_threads(1)
    group = join(kind, place, rank, size)
    found = {}
    for num_bytes in SIZES:
        x = torch.zeros(num_bytes // 4)
        found[num_bytes] = median_s(lambda x=x: group.all_reduce(x), max(5, repeats * SIZES[2] // num_bytes), warmup=0)  # type: ignore[misc]
    if rank == 0:
        print(json.dumps(found), flush=True)
    group.all_reduce(torch.zeros(1))
    if isinstance(group, CpuGroup):
        group.close()


GOAL_BYTES, GOAL_RATIO = 64 << 10, 5.0
"""At this size, sums through shared memory are to take a fifth of gloo's time."""


def measure_sums(num_ranks: int, pairs: int, repeats: int) -> list[Result]:
    """Each size's median over `pairs` runs of both, in turns."""
    runs: dict[str, list[dict[int, float]]] = {"shared-memory": [], "gloo": []}
    for _, kind in turns(list(runs), pairs):
        runs[kind].append(_run(kind, num_ranks, repeats))
    results = []
    for num_bytes in SIZES:
        own, gloo = ([run[num_bytes] for run in found] for found in runs.values())
        ours, ratio = median(own), median_ratio(gloo, own)
        source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
        copied = median_s(lambda source=source, target=target: target.copy_(source), 50)  # type: ignore[misc]
        name = f"sum of {shown(num_bytes)} over {num_ranks} ranks"
        results.append(Result(name, ours * 1e6, "us", copied * 1e6, copied / ours, "gloo", ratio))
    return results


def _run(kind: str, num_ranks: int, repeats: int) -> dict[int, float]:
    """Bytes → seconds. Raises Internal where a rank fails."""
    with tempfile.TemporaryDirectory(prefix="tandem-parallel-") as folder:
        descriptor = shared_memory(group_bytes(load(choose()[1]), num_ranks))
        place = str(Path(folder, "store")) if kind == "gloo" else str(descriptor)
        arguments = [num_ranks, repeats, kind, place]
        found = run_ranks("loadtest.bench.parallel.sums", num_ranks, arguments, [descriptor])
    return {int(num_bytes): seconds for num_bytes, seconds in found.items()}


if __name__ == "__main__":
    main()
