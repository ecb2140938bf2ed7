"""How a projection's weight is kept in fewer bits: what goes from a model's configuration to the makers of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The form of one weight; the same for the parts that are fused into one."""

    kind: Kind
    group: int
    """Adjacent columns of a row that share a scale; 0 = all of them."""
    has_zeros: bool = False
    index_groups: int = 0
    """Groups of a row where any columns may form one, as the weight's own index says; 0 = adjacent columns do."""
    rounds_input: bool = False
    """Whether rows of x are rounded to int8 too where the computation is in 16 bits, with a scale a row from that row
    alone; in fp32 they stay as they are."""
    has_lows: bool = False
    """Whether its zeros are numbers that are taken from the scaled codes; such rows of x are not rounded."""

    def num_groups(self, in_size: int) -> int:
        """Number of scales of a row, or of some columns of one."""
        if self.index_groups:
            return self.index_groups
        return -(-in_size // self.group) if self.group else 1


_GROUPS = (128, 64, 32, 16)


def int4_spec(in_size: int) -> LinearSpec | None:
    """Form of plain numbers that are rounded to 4 bits, in the largest groups of columns that divide a row; None where
    none does."""
    group = next((group for group in _GROUPS if in_size % group == 0), None)
    return None if group is None else LinearSpec("int4", group, has_zeros=True)
