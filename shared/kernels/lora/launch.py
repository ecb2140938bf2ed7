"""Launcher of Triton's low-rank additions: two launches a projection, for all additions of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.kernels.device import next_power_of_2
from shared.kernels.lora.jit import expand_tiles, shrink_tiles
from shared.kernels.lora.parts import MOST_PARTS, SPLITS, LoraPart
from shared.kernels.lora.reference import check_add_lora, check_parts
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import Lora

META = 3 + 5 * MOST_PARTS
"""Numbers that describe an addition, as in `jit`."""
ROWS = 16
"""Rows of a tile, the fewest that a product takes."""
DEPTH = 64
"""Inputs that a program multiplies at a time."""
COLUMNS = 64
"""Outputs of a program."""
MOST_RANKS = 64
"""Ranks of a program."""


class TritonLora:
    """See `Lora`: a of all parts [ranks, in_size], and of each part b [outputs, rank]."""

    def __init__(self, parts: Sequence[LoraPart], in_size: int, like: Tensor) -> None:
        """At most MOST_PARTS parts."""
        check_parts(parts, in_size)
        assert len(parts) <= MOST_PARTS, f"{len(parts)} parts"
        self.a = torch.cat([part.a.to(like) for part in parts]).contiguous()
        self._bs = [part.b.to(like).contiguous() for part in parts]
        self.ranks = self.a.shape[0]
        self.most_outputs = max(b.shape[0] for b in self._bs)
        fields, first = [self.a.data_ptr(), self.ranks, len(parts)], 0
        for part, b in zip(parts, self._bs, strict=True):
            fields += [b.data_ptr(), part.begin, b.shape[0], first, b.shape[1]]
            first += b.shape[1]
        fields += [0] * (META - len(fields))
        self.meta = torch.tensor(fields, dtype=torch.int64).to(like.device)
        scales = [part.scale for part in parts] + [0.0] * (MOST_PARTS - len(parts))
        self.scales = torch.tensor(scales, dtype=torch.float32).to(like.device)

    @property
    def nbytes(self) -> int:
        """See `Lora`."""
        return self.a.nbytes + sum(b.nbytes for b in self._bs)


def add_lora(out: Tensor, x: Tensor, loras: Sequence[Lora | None], rows: LoraRows) -> None:
    """See `LoraOps`."""
    check_add_lora(out, x, loras, rows)
    known = [lora for lora in loras if lora is not None]
    if not rows.num_rows or not known:
        return
    assert all(isinstance(lora, TritonLora) for lora in known), "an adapter of another backend"
    packed = [lora if isinstance(lora, TritonLora) else None for lora in loras]
    tiles = rows.remember(
        "triton", lambda: torch.tensor(rows.tiles(ROWS), dtype=torch.int32).to(x.device, non_blocking=True)
    )
    meta = torch.stack([x.new_zeros(META, dtype=torch.int64) if lora is None else lora.meta for lora in packed])
    scales = torch.stack(
        [x.new_zeros(MOST_PARTS, dtype=torch.float32) if lora is None else lora.scales for lora in packed]
    )
    most_ranks = max(lora.ranks for lora in packed if lora is not None)
    most_outputs = max(lora.most_outputs for lora in packed if lora is not None)
    launch(out, x, meta, scales, tiles, rows.order, rows.num_rows, most_ranks, most_outputs)


def launch(
    out: Tensor,
    x: Tensor,
    meta: Tensor,
    scales: Tensor,
    tiles: Tensor,
    order: Tensor,
    num_rows: int,
    most_ranks: int,
    most_outputs: int,
) -> None:
    """Both kernels; tensors as in `jit`. `num_rows`: at least those that tiles name. `most_ranks`, `most_outputs`: at
    least those of any addition that has rows."""
    ranks = min(MOST_RANKS, max(16, next_power_of_2(most_ranks)))
    sums = torch.empty((SPLITS, num_rows, most_ranks), dtype=torch.float32, device=x.device)
    sizes = {"META": META, "SPLITS": SPLITS, "ROWS": ROWS, "RANKS": ranks, "num_warps": 4}
    shrink_tiles[(len(tiles), SPLITS, -(-most_ranks // ranks))](
        x, meta, tiles, order, sums, x.shape[1], num_rows, most_ranks, DEPTH=DEPTH, **sizes
    )
    expand_tiles[(len(tiles), -(-most_outputs // COLUMNS), MOST_PARTS)](
        out, meta, scales, tiles, order, sums, out.shape[1], num_rows, most_ranks, COLUMNS=COLUMNS, **sizes
    )
