"""The feed-forward block of a layer."""

from __future__ import annotations

from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.model.parameters import LayerParameters


class Mlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, parameters: LayerParameters, kernels: DecoderOps) -> None:
        """Keeps a reference to the parameters."""
        self._parameters = parameters
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same shape."""
        weights = self._parameters
        gate_up = self._kernels.linear(x, weights.gate_up, weights.gate_up_bias)
        return self._kernels.linear(self._kernels.silu_mul(gate_up), weights.down, weights.down_bias)
