"""`Collectives` over torch.distributed: gloo on the CPU, between hosts too; NCCL for tensors on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

from shared.errors import RankLost

LIMIT_S = 2.0
"""A call that takes longer has met a rank that is stuck."""


class DistributedGroup:
    """See `Collectives`. A group of its own, apart from torch's default one: a process may belong to several.

    A call that meets a dead rank fails at once, one that meets a stuck rank after `limit_s`; which rank it was, torch
    does not say, so the error's `rank` is missing.
    """

    def __init__(self, rank: int, size: int, store: Store, backend: str = "gloo", limit_s: float = LIMIT_S) -> None:
        """Returns when all ranks have joined by the same `store`, which no other group uses. Raises RankLost."""
        self._rank, self._size = rank, size
        limit = timedelta(seconds=limit_s)
        self._group: Any
        with _typed():
            if backend == "nccl":
                options = distributed.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = distributed.ProcessGroupGloo(store, rank, size, limit)

    @property
    def rank(self) -> int:
        """See `Collectives`."""
        return self._rank

    @property
    def size(self) -> int:
        """See `Collectives`."""
        return self._size

    def all_reduce(self, x: Tensor) -> None:
        """See `Collectives`. Each rank adds up all parts, in the ranks' order: the bits must not depend on the ring."""
        parts = x.new_empty((self._size, *x.shape))
        with _typed():
            self._group.allgather([list(parts.unbind())], [x]).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def gather(self, x: Tensor) -> Tensor | None:
        """See `Collectives`."""
        out = x.new_empty((self._size, *x.shape)) if self._rank == 0 else None
        options = distributed.GatherOptions()
        options.rootRank = 0
        with _typed():
            self._group.gather([] if out is None else [list(out.unbind())], [x], options).wait()
        return out

    def broadcast(self, x: Tensor) -> None:
        """See `Collectives`."""
        with _typed():
            self._group.broadcast(x, 0).wait()

    def close(self) -> None:
        """See `Collectives`."""
        if hasattr(self, "_group"):
            del self._group


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own errors of a lost or late peer are of this class
        raise RankLost(f"a rank of this worker's group died, or is stuck: {error}") from error
