"""The gated activations in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.activation.activations import SILU, Activation


def check_act_and_mul(gate_up: Tensor) -> None:
    """Assert what `DecoderOps.act_and_mul` asks of its argument."""
    assert gate_up.dim() == 2
    assert gate_up.shape[1] % 2 == 0


def act_and_mul(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """`DecoderOps.act_and_mul`."""
    check_act_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    match activation.gate:
        case "silu":
            return functional.silu(gate) * up
        case "gelu_tanh":
            return functional.gelu(gate, approximate="tanh") * up
        case "clamped":
            gate = gate.clamp(max=activation.limit)
            up = up.clamp(-activation.limit, activation.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))
