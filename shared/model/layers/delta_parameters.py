"""Parameters of a layer with a state, and their tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.model.config.delta_config import DeltaConfig
from shared.model.layers.fused_rows import delta_rows, rate_rows

_FP32 = torch.float32


@dataclass(frozen=True)
class DeltaParameters:
    """Beside the projections that a layer with attention has too. By head, where a checkpoint has them so: see
    `delta_rows`."""

    rates: Tensor  # [rows of `rate_rows`, hidden_size]
    conv: Tensor  # [mixed_size, 1, kernel_size]
    log_decay: Tensor  # [num_value_heads] fp32
    decay_bias: Tensor  # [decay_size] fp32
    norm: Tensor  # [value_dim]
    decays: Tensor | None  # [decay_size, low_rank], as the next one where channels decay by themselves; else None
    gates: Tensor | None  # [value_size, low_rank]


def allocate_delta(delta: DeltaConfig, hidden: int, dtype: torch.dtype, device: torch.device | str) -> DeltaParameters:
    """Uninitialised."""

    def new(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    return DeltaParameters(
        rates=new(sum(rate_rows(delta).values()), hidden),
        conv=new(delta.mixed_size, 1, delta.kernel_size),
        log_decay=new(delta.num_value_heads, of=_FP32),
        decay_bias=new(delta.decay_size, of=_FP32),
        norm=new(delta.value_dim),
        decays=new(delta.decay_size, delta.low_rank) if delta.low_rank else None,
        gates=new(delta.value_size, delta.low_rank) if delta.low_rank else None,
    )


def delta_views(delta: DeltaConfig, layer: DeltaParameters) -> dict[str, Tensor]:
    """Checkpoint name → the view of these parameters that it fills."""
    rates = {f"{name}.weight": view for name, view in _split(layer.rates, rate_rows(delta)).items()}
    if layer.decays is None or layer.gates is None:
        return rates | {
            "linear_attn.conv1d.weight": layer.conv,
            "linear_attn.A_log": layer.log_decay,
            "linear_attn.dt_bias": layer.decay_bias,
            "linear_attn.norm.weight": layer.norm,
        }
    channels = dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), delta_rows(delta).values(), strict=True))
    return rates | {
        **{f"self_attn.{name}.weight": view for name, view in _split(layer.conv, channels).items()},
        "self_attn.A_log": layer.log_decay.view(1, 1, -1, 1),
        "self_attn.dt_bias": layer.decay_bias,
        "self_attn.o_norm.weight": layer.norm,
        "self_attn.f_b_proj.weight": layer.decays,
        "self_attn.g_b_proj.weight": layer.gates,
    }


def part_orders(delta: DeltaConfig) -> tuple[Tensor, Tensor]:
    """Rows by key head in the order of `mixed_size` and the gates, of all heads each; and of the rates and decays."""
    times = delta.num_value_heads // delta.num_key_heads

    def order(sizes: list[int]) -> Tensor:
        by_head = torch.arange(delta.num_key_heads * sum(sizes), device="cpu").view(delta.num_key_heads, -1)
        return torch.cat([part.flatten() for part in torch.split(by_head, sizes, 1)])

    of_values = times * delta.value_dim
    return order([delta.key_dim, delta.key_dim, of_values, of_values]), order([times, times])


def _split(fused: Tensor, rows: dict[str, int]) -> dict[str, Tensor]:
    parts: Sequence[Tensor] = torch.split(fused, list(rows.values()))
    return dict(zip(rows, parts, strict=True))
