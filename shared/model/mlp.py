"""The feed-forward block of a layer."""

from __future__ import annotations

from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.model.modules import LayerModules


class Mlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, layer: LayerModules, kernels: DecoderOps) -> None:
        """Keeps references to its arguments."""
        self._layer = layer
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same shape."""
        gate_up = self._layer.gate_up.forward(x)
        return self._layer.down.forward(self._kernels.silu_mul(gate_up))
