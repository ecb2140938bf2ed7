"""The gated activation in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def check_silu_mul(gate_up: Tensor) -> None:
    """Assert what `DecoderOps.silu_mul` asks of its argument."""
    assert gate_up.dim() == 2
    assert gate_up.shape[1] % 2 == 0


def silu_mul(gate_up: Tensor) -> Tensor:
    """`DecoderOps.silu_mul`."""
    check_silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
