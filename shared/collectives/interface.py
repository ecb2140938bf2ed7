"""The interface by which the ranks of a group add up tensors and pass messages."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The ranks 0 … size - 1 of one group. All of them make the same calls in one order, each from one
    thread at a time.

    A call returns when this rank's part is done and its arguments may be used again. Once a rank
    is known to be gone, the call raises RankLost, and so does every later one.
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Replaces `x` by the sum of all ranks' `x`: contiguous, of one shape, fp32 or bf16, added in fp32. All ranks
        get the same bits."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """[size, *x.shape] on rank 0, None elsewhere; `x` is contiguous, of one shape and dtype on all ranks."""
        ...

    def scatter(self, parts: Tensor | None, out: Tensor) -> None:
        """Fills each rank's `out` with its own of rank 0's `parts`, [size, *out.shape], which are None elsewhere; all
        are contiguous, of one shape and dtype. Rank 0 need not wait for the others."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Fills `x`, contiguous and of one shape and dtype, with rank 0's. Rank 0 need not wait for the others."""
        ...

    def fail(self, rank: int) -> None:
        """Ends this rank's waits for any other: `rank`, by its number in the worker's group, is known to be gone. The
        one call that may come from any thread."""
        ...

    def close(self) -> None:
        """Leaves the group. What this rank has sent can still be read; a call that waits for more of it raises RankLost
        at once. Twice is fine."""
        ...
