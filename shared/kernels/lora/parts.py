"""A low-rank addition to a projection, as a checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # settings, which import no torch, read the limits
    from torch import Tensor

MOST_PARTS = 4
"""Parts of one projection at most, where a layer has a state: queries to values, gates, rates, decays. In
cpu/source/lora.h too."""
MAX_RANK = 256
"""The highest rank of a part. In cpu/source/lora.h too."""

SPLITS = 8
"""Programs of a GPU that share the inputs of a tile of rows; fixed, so that sums have one order."""


def gpu_sum_bytes(num_rows: int, max_rank: int) -> int:
    """Memory between the two products of a GPU's additions, of a step of `num_rows` rows: sums in fp32."""
    return SPLITS * num_rows * MOST_PARTS * max_rank * 4


@dataclass(frozen=True, eq=False)
class LoraPart:
    """`scale * (x a^T) b^T`, added to some adjacent outputs of a projection (Hu et al. 2021, arXiv:2106.09685).

    A projection that is several fused into one has a part for each of these, with an `a` of its own.
    """

    a: Tensor  # [rank, in_size]
    b: Tensor  # [num_outputs, rank]
    scale: float
    begin: int  # the first of the outputs
