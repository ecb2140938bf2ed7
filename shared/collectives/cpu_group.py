"""`Collectives` between processes of one host through shared memory: `kernels/cpu/source/group.cpp` does the work."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from shared.errors import RankLost

SLOT_BYTES = 256 << 10
"""Longest message; longer ones go in pieces, whose copies stay in the cache."""
SINGLE_BYTES = 64 << 10
"""Up to this many bytes, ranks with a core each add up in one message; beyond, more than two of them add a share each.
With fewer cores than ranks one message is all there is: waiting for a rank costs more than adding everything up."""
STUCK_S = 30.0
"""Seconds. A rank counts as lost when its process has not run for this much longer than one's own. The process that
started it notices at once that it ended or was stopped; this limit is for a rank that gets no core, and it is long
because load alone must not end a group."""
MEETING_S = 300.0
"""Time for all processes of a group to have started."""
_MEETING_STEP_NS = 100_000_000
MAX_RANKS = 16


def declare(library: ctypes.CDLL) -> None:
    """Declares the argument types of the group's functions."""
    p, n = c_void_p, c_int64
    for name, arguments, result in (
        ("group_bytes", [n, n], n),
        ("group_join", [c_int, n, n, p, n, n, n], p),
        ("group_meet", [p, n], c_int),
        ("group_leave", [p], None),
        ("group_fail", [p, n], None),
        ("group_fault", [p], c_int),
        ("all_reduce", [p, p, n, c_int], c_int),
        ("gather", [p, p, n, p], c_int),
        ("scatter", [p, p, n, p], c_int),
        ("broadcast", [p, p, n], c_int),
    ):
        function = getattr(library, f"tandem_{name}")
        function.argtypes = arguments
        function.restype = result


def shared_memory(num_bytes: int = 0) -> int:
    """A file descriptor of zeroed memory without a name, for this process and those that inherit it; its owner closes
    it. It is gone with the last of them, however they end."""
    descriptor = os.memfd_create("tandem-group")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class CpuGroup:
    """See `Collectives`. One thread at a time makes its calls; `fail` and `lost_rank` may be called from any."""

    def __init__(
        self,
        library: ctypes.CDLL,
        descriptor: int,
        rank: int,
        size: int,
        names: Sequence[int] | None = None,
        stuck_s: float = STUCK_S,
        single_bytes: int | None = None,
    ) -> None:
        """Joins the group in the memory behind `descriptor`, of `group_bytes`; others may join later.

        `single_bytes`: up to which sums take one message, the same for all ranks; None: what suits this host.
        `names`: the ranks' numbers for errors, where this is a part of a larger group; by default 0 … size - 1.
        Raises RankLost where there is no room to map it.
        """
        assert 0 <= rank < size <= MAX_RANKS
        declare(library)
        self._library = library
        self._rank, self._size = rank, size
        ranks = (c_int64 * size)(*(names or range(size)))
        self._name = ranks[rank]
        if single_bytes is None:  # by the host's cores, not by those that this process may use: all ranks must agree
            single_bytes = SINGLE_BYTES if size <= (os.cpu_count() or 1) else SLOT_BYTES
        self.handle: int | None = library.tandem_group_join(
            descriptor, rank, size, ranks, SLOT_BYTES, single_bytes, int(stuck_s * 1e9)
        )
        """The group within the C++ kernels; None once closed."""
        if self.handle is None:
            raise RankLost(f"rank {rank} cannot map its group's memory", rank=rank)

    @property
    def rank(self) -> int:
        """See `Collectives`."""
        return self._rank

    @property
    def size(self) -> int:
        """See `Collectives`."""
        return self._size

    def meet(self, check: Callable[[], None] = lambda: None, limit_s: float = MEETING_S) -> None:
        """Waits until all have joined, before the first message. `check` is called meanwhile, and raises where one
        will not come. A rank that gives up ends the others' wait too. Raises RankLost."""
        end = time.monotonic() + limit_s
        while found := self._library.tandem_group_meet(self.handle, _MEETING_STEP_NS):
            self.check(max(0, found))
            try:
                check()
                if time.monotonic() > end:
                    self.check(-found)
            except BaseException:
                self.fail(self._name)
                raise

    def all_reduce(self, x: Tensor) -> None:
        """See `Collectives`."""
        assert x.is_contiguous()
        assert x.dtype in (torch.float32, torch.bfloat16), f"sums of {x.dtype}"
        is_bf16 = int(x.dtype == torch.bfloat16)
        self.check(self._library.tandem_all_reduce(self.handle, x.data_ptr(), x.numel(), is_bf16))

    def gather(self, x: Tensor) -> Tensor | None:
        """See `Collectives`."""
        assert x.is_contiguous()
        out = x.new_empty((self._size, *x.shape)) if self._rank == 0 else None
        pointer = None if out is None else out.data_ptr()
        self.check(self._library.tandem_gather(self.handle, x.data_ptr(), x.nbytes, pointer))
        return out

    def scatter(self, parts: Tensor | None, out: Tensor) -> None:
        """See `Collectives`."""
        assert out.is_contiguous()
        if parts is not None:
            assert parts.is_contiguous()
            assert (parts.shape, parts.dtype) == ((self._size, *out.shape), out.dtype)
        pointer = None if parts is None else parts.data_ptr()
        self.check(self._library.tandem_scatter(self.handle, pointer, out.nbytes, out.data_ptr()))

    def broadcast(self, x: Tensor) -> None:
        """See `Collectives`."""
        assert x.is_contiguous()
        self.check(self._library.tandem_broadcast(self.handle, x.data_ptr(), x.nbytes))

    def close(self) -> None:
        """See `Collectives`."""
        if self.handle is not None:
            self._library.tandem_group_leave(self.handle)
            self.handle = None

    def fail(self, rank: int) -> None:
        """Ends every wait of all ranks: `rank`, by its name and of this group or not, is known to be gone."""
        if self.handle is not None:
            self._library.tandem_group_fail(self.handle, rank)

    def lost_rank(self) -> int | None:
        """A rank that has left, is gone or stuck, by its name; None while all run."""
        failed = 0 if self.handle is None else self._library.tandem_group_fault(self.handle)
        return failed - 1 if failed else None

    def check(self, failed: int) -> None:
        """Raises RankLost for what the C++ functions return, unless it is 0."""
        if failed:
            raise lost(failed - 1)


def lost(rank: int) -> RankLost:
    """The error of a rank that is gone."""
    return RankLost(f"rank {rank} of this worker's group died, or is stuck", rank=rank)


def group_bytes(library: ctypes.CDLL, size: int) -> int:
    """Bytes of shared memory that a group of `size` ranks needs."""
    declare(library)
    return int(library.tandem_group_bytes(size, SLOT_BYTES))
