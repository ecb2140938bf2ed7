"""A low-rank addition to a projection, as a checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LoraPart:
    """`scale * (x a^T) b^T`, added to some adjacent outputs of a projection (Hu et al. 2021, arXiv:2106.09685).

    A projection that is several fused into one has a part for each of these, with an `a` of its own.
    """

    a: Tensor  # [rank, in_size]
    b: Tensor  # [num_outputs, rank]
    scale: float
    begin: int  # the first of the outputs
