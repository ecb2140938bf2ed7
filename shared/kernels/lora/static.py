"""Low-rank additions of decode steps over tensors that never move: what a CUDA graph can hold.

A slot's weights are found by a table on the device, and a row's slot by tiles that are copied there for each step. Slot
0 is the base model: it has no parts, and a tile of it ends at once, as do those that a step does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.lora.launch import META, ROWS, TritonLora, launch
from shared.kernels.lora.parts import MOST_PARTS
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import PROJECTIONS, PackedAdapter, Projection, StepExpertLoras


class TritonSlots:
    """See `LoraSlots`."""

    def __init__(self, num_layers: int, num_slots: int, most_rows: int, max_rank: int, like: Tensor) -> None:
        """As for `HoldsLoras.hold_loras`."""
        places, device = num_layers * len(PROJECTIONS), like.device
        self._num_slots = num_slots
        self._most_ranks = MOST_PARTS * max_rank
        self._meta = torch.zeros((places, num_slots + 1, META), dtype=torch.int64, device=device)
        self._scales = torch.zeros((places, num_slots + 1, MOST_PARTS), dtype=torch.float32, device=device)
        self._rows = torch.zeros(self._num_bytes(most_rows), dtype=torch.uint8, device=device)

    def place(self, slot: int, adapter: PackedAdapter | None) -> bool:
        """See `LoraSlots`."""
        meta, scales = self._meta[:, slot], self._scales[:, slot]
        meta.zero_()
        if adapter is None or adapter.experts:
            return False
        made = [lora if isinstance(lora, TritonLora) else None for lora in adapter.loras]
        no_meta, no_scales = torch.zeros_like(meta[0]), torch.zeros_like(scales[0])
        meta.copy_(torch.stack([no_meta if lora is None else lora.meta for lora in made]))
        scales.copy_(torch.stack([no_scales if lora is None else lora.scales for lora in made]))
        return True

    def fill(self, slots: Sequence[int], size: int, empty: Callable[[int], Tensor]) -> None:
        """See `LoraSlots`."""
        rows = LoraRows.of([slot or -1 for slot in slots], self._num_slots + 1)
        host = empty(self._num_bytes(size))
        order, tiles = _views(host, size)
        host.zero_()
        order[: rows.num_rows] = rows.order
        found = torch.tensor(rows.tiles(ROWS), dtype=torch.int32).view(-1, 3)
        tiles[: found.shape[0]] = found
        self._rows[: host.shape[0]].copy_(host, non_blocking=True)

    def step(self, size: int) -> _StaticStep:
        """See `LoraSlots`."""
        order, tiles = _views(self._rows[: self._num_bytes(size)], size)
        return _StaticStep(self._meta, self._scales, order, tiles, self._most_ranks)

    def _num_bytes(self, size: int) -> int:
        most_tiles = min(size, self._num_slots + -(-size // ROWS))
        return 8 * size + 12 * most_tiles


def _views(content: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Order [size] int64, and tiles [most_tiles, 3] int32, of their bytes."""
    return content[: 8 * size].view(torch.int64), content[8 * size :].view(torch.int32).view(-1, 3)


@dataclass(frozen=True, eq=False)
class _StaticStep:
    """See `Loras`."""

    meta: Tensor  # [num_layers * 4, slots, META] int64
    scales: Tensor  # [num_layers * 4, slots, MOST_PARTS] fp32
    order: Tensor  # [size] int64
    tiles: Tensor  # [most_tiles, 3] int32
    most_ranks: int

    def add(self, out: Tensor, x: Tensor, layer: int, projection: Projection) -> None:
        """See `Loras`."""
        place = layer * len(PROJECTIONS) + PROJECTIONS.index(projection)
        assert out.shape[0] == x.shape[0] == self.order.shape[0]
        tables = self.meta[place], self.scales[place]
        launch(out, x, *tables, self.tiles, self.order, self.order.shape[0], self.most_ranks, out.shape[1])

    def experts(self, layer: int) -> StepExpertLoras | None:  # noqa: ARG002  # no slot here adds to experts
        """See `Loras`."""
        return None

    def of_kept(self) -> _StaticStep:
        """See `Loras`: a decode step wants all of its rows."""
        return self
