"""A low-rank addition to a projection, as a checkpoint has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # settings, which import no torch, read the limits
    from torch import Tensor

MOST_PARTS = 3
"""Parts of one projection at most: queries, keys and values. In cpu/source/lora.h too."""
MAX_RANK = 256
"""The highest rank of a part. In cpu/source/lora.h too."""


@dataclass(frozen=True, eq=False)
class LoraPart:
    """`scale * (x a^T) b^T`, added to some adjacent outputs of a projection (Hu et al. 2021, arXiv:2106.09685).

    A projection that is several fused into one has a part for each of these, with an `a` of its own.
    """

    a: Tensor  # [rank, in_size]
    b: Tensor  # [num_outputs, rank]
    scale: float
    begin: int  # the first of the outputs
