"""A case of an op's benchmark; `loadtest.bench.kernels` runs them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One kernel at one shape."""

    op: str
    shape: str
    run: Callable[[], object]
    num_bytes: int  # the fewest that must move
    num_flops: int = 0  # 0 where memory is the limit
