"""Which groups a rank of tensor x pipeline ranks belongs to, and their memory on one host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shared.collectives.interface import Collectives
from shared.kernels.cpu.group import CpuGroup, group_bytes, shared_memory


@dataclass(frozen=True, slots=True)
class RankLinks:
    """A rank's ways to the others; one object may be several of them, since all ranks call in one order."""

    everyone: Collectives
    """All ranks of the group; the first is its leader."""
    stage: Collectives | None
    """The ranks that split this stage's projections; None where it is alone."""
    head: Collectives | None
    """The leader and the last stage's ranks, or the only stage's; None where this rank is neither."""
    behind: Collectives | None
    """A pair: the same part of the stage before, and this rank."""
    ahead: Collectives | None
    """A pair: this rank, and the same part of the next stage."""

    def fail(self, rank: int) -> None:
        """Ends this rank's waits for any other: `rank` is known to be gone. From any thread."""
        for group in self._all:
            if isinstance(group, CpuGroup):
                group.fail(rank)

    def close(self) -> None:
        """Leaves them all. Twice is fine."""
        for group in self._all:
            group.close()

    @property
    def _all(self) -> Iterator[Collectives]:
        return (x for x in (self.everyone, self.stage, self.head, self.behind, self.ahead) if x is not None)


def memberships(tensor: int, pipeline: int) -> list[tuple[int, ...]]:
    """The ranks of each group that `tensor` x `pipeline` ranks need: everyone, then with several stages each stage, the
    head, and each pair of neighbours."""
    everyone = tuple(range(tensor * pipeline))
    if pipeline == 1:
        return [everyone]
    stages = [everyone[first : first + tensor] for first in range(0, len(everyone), tensor)]
    pairs = [(rank, rank + tensor) for rank in everyone[:-tensor]]
    return list(dict.fromkeys((everyone, *(stages if tensor > 1 else []), (0, *stages[-1]), *pairs)))


def shared_memories(library: ctypes.CDLL, tensor: int, pipeline: int) -> list[int]:
    """A file descriptor for each of `memberships`, which the caller closes; all ranks inherit them."""
    return [shared_memory(group_bytes(library, len(ranks))) for ranks in memberships(tensor, pipeline)]


def join(
    library: ctypes.CDLL,
    descriptors: Sequence[int],
    rank: int,
    tensor: int,
    pipeline: int,
    check: Callable[[], None] = lambda: None,
) -> RankLinks:
    """Joins this rank's groups and waits until all ranks have; `check` as for `CpuGroup.meet`. Raises RankLost."""
    joined: dict[tuple[int, ...], CpuGroup] = {}
    for ranks, descriptor in zip(memberships(tensor, pipeline), descriptors, strict=True):
        if rank in ranks:
            joined[ranks] = CpuGroup(library, descriptor, ranks.index(rank), len(ranks), ranks)
    for group in joined.values():
        group.meet(check)
    everyone = joined[tuple(range(tensor * pipeline))]
    if pipeline == 1:
        return RankLinks(everyone, everyone, everyone, None, None)
    first = rank - rank % tensor
    last_stage = range(tensor * (pipeline - 1), tensor * pipeline)
    return RankLinks(
        everyone,
        joined.get(tuple(range(first, first + tensor))) if tensor > 1 else None,
        joined.get((0, *last_stage)),
        joined.get((rank - tensor, rank)),
        joined.get((rank, rank + tensor)),
    )
