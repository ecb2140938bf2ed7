"""`python -m loadtest.bench.parallel.rank KIND PLACE RANK SIZE REPEATS`: one rank of a measured group.

KIND is shared-memory, with an inherited descriptor as its PLACE, or gloo, with a new file's path. Rank 0 prints a JSON
object: bytes → median seconds of a sum.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from time import perf_counter

import torch
from torch._C._distributed_c10d import FileStore

from shared.collectives.distributed import DistributedGroup
from shared.collectives.interface import Collectives
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.group import CpuGroup
from shared.kernels.cpu.launch import load

SIZES = tuple(4096 << (2 * step) for step in range(7))
"""4 KiB to 16 MiB."""
_LIMIT_S = 60.0
"""gloo's: a shared machine may pause a rank for longer than a worker's limit."""


def join(kind: str, place: str, rank: int, size: int) -> Collectives:
    """The group, once all ranks have joined."""
    if kind == "gloo":
        return DistributedGroup(rank, size, FileStore(place, size), limit_s=_LIMIT_S)
    group = CpuGroup(load(choose()[1]), int(place), rank, size, stuck_s=_LIMIT_S)
    group.meet()
    return group


def sum_s(group: Collectives, num_bytes: int, repeats: int) -> float:
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
    group.close()


if __name__ == "__main__":
    main()
