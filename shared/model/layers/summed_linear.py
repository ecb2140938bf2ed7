"""Projections whose input is split over ranks: each rank's result is a part of a sum."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shared.collectives.interface import Collectives
from shared.kernels.backend import Linear
from shared.model.layers.modules import DecoderModules, LayerModules


class SummedLinear:
    """See `Linear`; every rank calls `forward` with its columns of x, and gets the whole result."""

    def __init__(self, part: Linear, group: Collectives) -> None:
        """Keeps references to its arguments; one rank's part has the bias."""
        self.part = part
        self._group = group

    @property
    def in_size(self) -> int:
        """See `Linear`."""
        return self.part.in_size

    @property
    def out_size(self) -> int:
        """See `Linear`."""
        return self.part.out_size

    @property
    def dtype(self) -> torch.dtype:
        """See `Linear`."""
        return self.part.dtype

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.part.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = self.part.forward(x)
        self._group.all_reduce(out)
        return out


def add_up(modules: DecoderModules, group: Collectives) -> DecoderModules:
    """The same modules, with what the projections back to the residual stream give added up over the ranks, and once
    what experts give."""
    return replace(modules, layers=tuple(_summed(layer, group) for layer in modules.layers))


def _summed(layer: LayerModules, group: Collectives) -> LayerModules:
    o = SummedLinear(layer.o, group)
    if layer.experts is not None:  # `down`, if there is one, is the shared experts': a part of the same sum
        return replace(layer, o=o, experts=replace(layer.experts, group=group))
    assert layer.down is not None, "a layer without a feed-forward block"
    return replace(layer, o=o, down=SummedLinear(layer.down, group))
