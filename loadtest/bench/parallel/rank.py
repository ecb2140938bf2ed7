"""`python -m loadtest.bench.parallel.rank KIND PLACE RANK SIZE REPEATS`: one rank of a measured group.

KIND is shared-memory, with an inherited descriptor as its PLACE, or gloo, with a new file's path. Rank 0 prints a JSON
object: bytes → median seconds of a sum.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore

from shared.kernels.cpu.build import choose
from shared.kernels.cpu.group import CpuGroup
from shared.kernels.cpu.launch import load

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


if __name__ == "__main__":
    main()
