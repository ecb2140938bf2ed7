"""`Collectives` over torch.distributed: gloo on the CPU, between hosts too; NCCL for tensors on GPUs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

from shared.collectives.cpu_group import lost
from shared.errors import RankLost

LIMIT_S = 600.0
"""Seconds. A call that takes longer waits for a rank that is stuck. The process that started the ranks notices a dead
or stopped one long before; the limit is long because a rank may wait for another's long prompt."""
MEETING_S = 120.0
"""Time for all ranks to join, which run already."""
LOOK_S = 0.25
"""A call that waits looks so often whether a rank is known to be gone."""
WHOLE_BYTES = 64 << 10
"""Up to this many bytes, every rank gets all parts and adds them up itself; beyond, more than two of them add a share
each: 2 (n - 1) / n of the bytes travel for each rank, not n - 1 times as many."""
LOOPBACK = "127.0.0.1"


class DistributedGroup:
    """See `Collectives`. A group of its own, apart from torch's default one: a process may belong to several.

    A call that meets a dead rank fails at once, one that waits for a rank named to `fail` within LOOK_S, any other
    after `limit_s`; which rank it was, torch does not say, so the error's `rank` is missing but after `fail`.

    With gloo, tensors on a GPU pass through host memory. With NCCL, a call returns when its work is queued behind that
    of the current stream, which waits for it in turn; so calls are ordered by the streams of all ranks. What a rank has
    gathered is there when an event recorded behind the call is reached, and then every rank has computed all that it
    had queued before its own call. `fail` ends what waits on the device too, with meaningless numbers: after reading
    a result, call `check`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        backend: str = "gloo",
        limit_s: float = LIMIT_S,
        address: str = "",
    ) -> None:
        """Returns when all ranks have joined by the same `store`, which no other group uses. `address`: of this host's
        network interface for gloo; empty = the one that its name stands for. Raises RankLost."""
        self._rank, self._size = rank, size
        self._in_host_memory = backend == "gloo"
        self._lost: RankLost | None = None
        self._group: Any = None
        try:
            if backend == "nccl":
                options = distributed.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=limit_s)
                self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
            else:
                gloo: Any = distributed.ProcessGroupGloo
                options = gloo._Options()
                options._timeout = timedelta(seconds=MEETING_S)
                options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
                self._group = gloo(store, rank, size, options)
                self._group._set_default_timeout(timedelta(seconds=limit_s))
        except RuntimeError as error:  # torch's own errors of a lost or late peer are of this class
            raise _gone(error) from error

    @property
    def rank(self) -> int:
        """See `Collectives`."""
        return self._rank

    @property
    def size(self) -> int:
        """See `Collectives`."""
        return self._size

    def all_reduce(self, x: Tensor) -> None:
        """See `Collectives`; fp16 too. Parts are added up in the ranks' order, each number by one rank or by all alike:
        the bits must not depend on the ring."""
        flat = self._reachable(x).view(-1)
        if self._size == 2:
            self._add_other(flat)
            total = flat
        else:
            total = self._sum_of_whole(flat) if flat.nbytes <= WHOLE_BYTES else self._sum_of_shares(flat)
        if total.data_ptr() != x.data_ptr():
            x.copy_(total.view(x.shape))

    def gather(self, x: Tensor) -> Tensor | None:
        """See `Collectives`."""
        if not x.numel():  # a gather waits for all: torch may send no message without content
            self.gather(x.new_zeros(1))
            return x.new_empty((self._size, *x.shape)) if self._rank == 0 else None
        part = self._reachable(x)
        out = part.new_empty((self._size, *part.shape)) if self._rank == 0 else None
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._run(lambda group: group.gather([] if out is None else [list(out.unbind())], [part], options))
        return None if out is None else out.to(x.device)

    def scatter(self, parts: Tensor | None, out: Tensor) -> None:
        """See `Collectives`."""
        part = self._reachable(out)
        given = [] if parts is None else [list(self._reachable(parts).unbind())]
        options = distributed.ScatterOptions()
        options.rootRank = 0
        self._run(lambda group: group.scatter([part], given, options))
        if part is not out:
            out.copy_(part)

    def broadcast(self, x: Tensor) -> None:
        """See `Collectives`."""
        part = self._reachable(x)
        self._run(lambda group: group.broadcast(part, 0))
        if part is not x and self._rank:
            x.copy_(part)

    def fail(self, rank: int) -> None:
        """See `Collectives`."""
        if self._lost is None and self._group is not None:
            self._lost = lost(rank)
            # Torch would wait for the lost rank to take a group apart: this one stays until the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            if not self._in_host_memory:
                # Beside each other: NCCL's groups of one process may wait for each other's end (pytorch issue 119797).
                threading.Thread(target=self._group.abort, name="abort", daemon=True).start()

    def check(self) -> None:
        """Raises RankLost where a rank is known to be gone, and with it what this one has received."""
        if self._lost is not None:
            raise RankLost(self._lost.message, rank=self._lost.details["rank"])

    def close(self) -> None:
        """See `Collectives`."""
        self._group = None

    def _reachable(self, x: Tensor) -> Tensor:
        """The tensor itself, or a copy where the backend reaches it."""
        assert x.is_contiguous()
        return x.cpu() if self._in_host_memory and x.is_cuda else x

    def _add_other(self, flat: Tensor) -> None:
        """The sum over two ranks: one addition of any dtype rounds as one in fp32 does, and is one launch on a GPU, not
        three."""
        parts = flat.new_empty(2 * flat.numel())
        self._run(lambda group: group._allgather_base(parts, flat))
        torch.add(*parts.view(2, flat.numel()), out=flat)

    def _sum_of_whole(self, flat: Tensor) -> Tensor:
        parts = flat.new_empty(self._size * flat.numel())
        self._run(lambda group: group._allgather_base(parts, flat))
        return _added(parts.view(self._size, -1))

    def _sum_of_shares(self, flat: Tensor) -> Tensor:
        """As `_sum_of_whole`: each rank adds up a share, then gets the others' sums."""
        share = -(-flat.numel() // self._size)
        padded = flat.new_zeros(share * self._size)
        padded[: flat.numel()] = flat
        parts = torch.empty_like(padded)
        self._run(lambda group: group.alltoall_base(parts, padded, [], [], distributed.AllToAllOptions()))
        own = _added(parts.view(self._size, share)).to(flat.dtype)
        self._run(lambda group: group._allgather_base(padded, own))
        return padded[: flat.numel()]

    def _run(self, begin: Callable[[Any], Any]) -> None:
        """Begins a call of the group's and waits for it: of torch's waits, those with a limit alone come back while a
        silent rank is waited for."""
        self.check()
        if self._group is None:
            raise RankLost("this rank has left its worker's group", rank=self._rank)
        try:
            work = begin(self._group)
            if not self._in_host_memory:
                work.wait()
                return
            while not _has_ended(work):
                self.check()
        except RuntimeError as error:
            self.check()
            raise _gone(error) from error


def _has_ended(work: Any) -> bool:
    """Waits a while. Raises RuntimeError where the work has failed."""
    try:
        work.wait(timedelta(seconds=LOOK_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what it failed of, if it did
    return True


def _added(parts: Tensor) -> Tensor:
    """[size, count] to their sum [count], fp32."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total


def _gone(error: RuntimeError) -> RankLost:
    return RankLost(f"a rank of this worker's group died, or is stuck: {error}")
