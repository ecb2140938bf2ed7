"""How the ranks of one host meet: through memory without a name, which the leader makes and its children inherit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import FileStore

from shared.collectives.cpu_group import CpuGroup, group_bytes, shared_memory
from shared.collectives.distributed import LOOPBACK, DistributedGroup
from shared.collectives.interface import Collectives
from shared.collectives.rank_links import Membership, RankLinks, Ways


def shared_memories(library: ctypes.CDLL, ways: Ways) -> list[int]:
    """A file descriptor for each of the ways' memberships, which the caller closes: messages' memory, or the file by
    which torch's groups find each other. All ranks inherit them."""
    return [
        shared_memory(group_bytes(library, len(group.ranks)) if group.backend == "shm" else 0)
        for group in ways.memberships
    ]


def join(
    library: ctypes.CDLL,
    descriptors: Sequence[int],
    rank: int,
    ways: Ways,
    check: Callable[[], None] = lambda: None,
) -> RankLinks:
    """Joins this rank's groups, one after the other, and waits until all ranks have; `check` as for `CpuGroup.meet`.
    Raises RankLost."""
    by_name = {group.name: descriptor for group, descriptor in zip(ways.memberships, descriptors, strict=True)}

    def connect(group: Membership) -> Collectives:
        own, size, descriptor = group.ranks.index(rank), len(group.ranks), by_name[group.name]
        if group.backend == "shm":
            joined = CpuGroup(library, descriptor, own, size, group.ranks)
            joined.meet(check)
            return joined
        # Each rank opens the file anew: its own place in it, and its own lock.
        store = FileStore(f"/proc/{os.getpid()}/fd/{descriptor}", -1)
        return DistributedGroup(own, size, store, group.backend, address=LOOPBACK)

    return ways.join(rank, connect)
