"""A rank in a process of its own, for tests that end it: adds up until another rank is lost, and says which one.

python -m tests.unit.collectives.member DESCRIPTOR RANK SIZE
"""

from __future__ import annotations

import sys
import time

import torch

from shared.collectives.cpu_group import CpuGroup
from shared.errors import RankLost
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load

STUCK_S = 1.5


def main() -> None:
    """Prints "running" once all ranks add up, then "lost RANK SECONDS": how long after the last sum it was noticed."""
    descriptor, rank, size = map(int, sys.argv[1:])
    group = CpuGroup(load(choose()[1]), descriptor, rank, size, stuck_s=STUCK_S)
    group.meet()
    x = torch.zeros(1024)
    group.all_reduce(x)
    print("running", flush=True)
    last = time.monotonic()
    try:
        while True:
            group.all_reduce(x)
            last = time.monotonic()
    except RankLost as error:
        print("lost", error.details["rank"], time.monotonic() - last, flush=True)


if __name__ == "__main__":
    main()
