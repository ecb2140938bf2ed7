"""The gated activation of the feed-forward block (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for the two halves of the last dimension.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size], gate first.

    Returns:
        [num_tokens, intermediate_size], same dtype.
    """
    assert gate_up.dim() == 2
    assert gate_up.shape[1] % 2 == 0
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Torch reference of `silu_mul`, same argument."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
