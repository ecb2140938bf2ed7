"""The gated activations of feed-forward blocks. No tensors: reading a configuration needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Gate = Literal["silu", "gelu_tanh", "clamped"]
GATES: tuple[Gate, ...] = get_args(Gate)
"""As kernels number them."""


@dataclass(frozen=True)
class Activation:
    """What becomes of gate and up.

    - silu: `silu(gate) * up` (SwiGLU, Shazeer 2020, arXiv:2002.05202).
    - gelu_tanh: `gelu(gate) * up`, gelu by its approximation with tanh.
    - clamped: gate at most `limit`, up within ± `limit`, then `gate * sigmoid(alpha * gate) * (up + 1)`.
    """

    gate: Gate = "silu"
    alpha: float = 1.0  # clamped
    limit: float = 0.0  # clamped


SILU = Activation()
GELU = Activation("gelu_tanh")
