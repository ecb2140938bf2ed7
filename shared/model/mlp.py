"""The feed-forward block of a layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from shared.kernels.activation import silu_mul
from shared.model.parameters import LayerParameters


class Mlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, parameters: LayerParameters) -> None:
        """Keeps a reference to the parameters."""
        self._parameters = parameters

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same shape."""
        weights = self._parameters
        gate_up = functional.linear(x, weights.gate_up, weights.gate_up_bias)
        return functional.linear(silu_mul(gate_up), weights.down, weights.down_bias)
