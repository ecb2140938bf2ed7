"""Which rows of a step have a low-rank addition, and which: sorted once a step, for all layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
TILE_ROWS = 8
"""Most rows of a tile, as in source/lora.h."""


@dataclass(frozen=True, eq=False)
class LoraRows:
    """The rows that have an addition, those of one addition together and rising; other rows are in no tensor here."""

    order: Tensor  # [num_rows] int64 on the model's device, rows of the step
    starts: tuple[int, ...]  # addition i has order[starts[i] : starts[i + 1]], which may be empty
    additions: tuple[int, ...]  # of each row of the step, -1 where it has none
    _remembered: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """Rows with an addition."""
        return self.starts[-1]

    @classmethod
    def of(cls, additions: Sequence[int], count: int, device: torch.device | str = "cpu") -> LoraRows:
        """`additions`: of each row of the step, below `count`, or -1 where it has none."""
        of_each: list[list[int]] = [[] for _ in range(count)]
        for row, addition in enumerate(additions):
            if addition >= 0:
                of_each[addition].append(row)
        starts = [0]
        for rows in of_each:
            starts.append(starts[-1] + len(rows))
        order = torch.tensor([row for rows in of_each for row in rows], dtype=torch.int64)
        return cls(order.to(device), tuple(starts), tuple(additions))

    def tiles(self, most: int = TILE_ROWS) -> list[tuple[int, int, int]]:
        """(addition, first place in `order`, one behind the last) of up to `most` rows each."""
        return [
            (addition, first, min(first + most, end))
            for addition, (start, end) in enumerate(zip(self.starts, self.starts[1:], strict=False))
            for first in range(start, end, most)
        ]

    def remember(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of `build()`, called once for a key: a backend's plan, the same for all layers."""
        if key not in self._remembered:
            self._remembered[key] = build()
        return cast(T, self._remembered[key])
