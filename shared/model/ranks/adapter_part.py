"""One rank's part of an adapter: cut as the modules' own weights are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.model.adapters.target_modules import Target
from shared.model.config.model_config import ModelConfig
from shared.model.ranks.shard import Shard
from shared.model.ranks.shard_weights import part_of


class ShardOfAdapter:
    """See `AdapterPart`."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    @property
    def local_config(self) -> ModelConfig:
        """See `AdapterPart`."""
        return self._shard.local_config

    @property
    def first_layer(self) -> int:
        """See `AdapterPart`."""
        return self._shard.layers.begin

    def experts(self, layer: int) -> Sequence[int]:
        """See `AdapterPart`."""
        found = self._shard.experts
        assert found is not None, "a dense model"
        return found[layer]

    def cut(self, module: str, target: Target, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See `AdapterPart`: the columns and rows that the rank has of the module's weight."""
        part = part_of(self._shard, f"{module}.weight", (target.num_outputs, target.in_size))
        if part.columns is not None:
            a = a[:, slice(*part.columns)].contiguous()
        return a, torch.cat([b[begin:end] for begin, end in part.rows])
