"""Launcher of Triton's gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.activation.activations import GATES, SILU, Activation
from shared.kernels.activation.jit import act_and_mul_tiles
from shared.kernels.activation.reference import check_act_and_mul
from shared.kernels.device import next_power_of_2

MAX_TILE = 2048


def constants(activation: Activation) -> dict[str, int | float]:
    """Compile-time constants of the kernels."""
    return {"GATE": GATES.index(activation.gate), "ALPHA": activation.alpha, "LIMIT": activation.limit}


def act_and_mul(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """`DecoderOps.act_and_mul`."""
    check_act_and_mul(gate_up)
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if output.numel() == 0:
        return output
    tile = min(MAX_TILE, next_power_of_2(size))
    act_and_mul_tiles[(num_tokens * -(-size // tile),)](
        gate_up,
        output,
        size,
        **constants(activation),
        TILE=tile,
        **devices.overlap(gate_up.device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return output
