"""As `member`, over gloo.

python -m tests.unit.collectives.tcp_member PATH RANK SIZE
"""

from __future__ import annotations

import sys

import torch
from torch import distributed

from shared.collectives.distributed import LOOPBACK, DistributedGroup
from shared.errors import RankLost


def main() -> None:
    """Prints "running" once all ranks add up, then "lost"."""
    path, *numbers = sys.argv[1:]
    rank, size = map(int, numbers)
    group = DistributedGroup(rank, size, distributed.FileStore(path, size), address=LOOPBACK)
    x = torch.zeros(100_000)
    group.all_reduce(x)
    print("running", flush=True)
    try:
        while True:
            group.all_reduce(x)
    except RankLost:
        print("lost", flush=True)


if __name__ == "__main__":
    main()
