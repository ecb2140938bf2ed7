"""Rotary position encoding: the angles of every token, for each type of context extension."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.model.config.model_config import ModelConfig, RopeConfig


class Rotary:
    """Cosines and sines for the tokens of a step.

    For every type but `dynamic` a token's angles depend on its position alone. Dynamic NTK increases the base with the
    length of the text read at once, so a token also needs that length: n for every token of a prompt of n tokens,
    however it is chunked, and p + 1 for a generated token at position p. This equals generation with a growing cache,
    and it keeps cached keys valid.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        """Compute the frequencies; `dtype` is that of the returned cosines and sines."""
        self._rope = config.rope
        self._dtype = dtype
        self._exponents = _exponents(config.rotary_dim).to(device)  # [rotary_dim / 2]
        frequencies, self._scale = inverse_frequencies(config.rope, config.rotary_dim)
        self._frequencies = frequencies.to(device)  # [rotary_dim / 2] fp32

    @property
    def needs_lengths(self) -> bool:
        """Whether `cos_sin` needs the lengths."""
        return self._rope.type == "dynamic"

    def cos_sin(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Angles of each token.

        Args:
            positions: [num_tokens] int64.
            lengths: [num_tokens] int64, see the class; read only if `needs_lengths`. A length below
                the trained one counts as the trained one.

        Returns:
            (cos, sin), both [num_tokens, rotary_dim] in the model's dtype, computed in fp32, both halves equal.
        """
        assert positions.dim() == 1
        frequencies = self._frequencies
        if self.needs_lengths:
            assert lengths is not None
            assert lengths.shape == positions.shape
            frequencies = self._dynamic_frequencies(lengths)
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(self._dtype), (angles.sin() * self._scale).to(self._dtype)

    def _dynamic_frequencies(self, lengths: Tensor) -> Tensor:
        """[num_tokens] lengths to [num_tokens, head_dim / 2] frequencies: one base for each token."""
        rope, dim = self._rope, 2 * self._exponents.shape[0]
        trained = rope.original_max_position_embeddings
        stretch = rope.factor * lengths.clamp(min=trained) / trained - (rope.factor - 1)
        bases = rope.theta * stretch ** (dim / (dim - 2))
        return 1.0 / bases[:, None] ** self._exponents


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per token of each rotated pair, and the factor on cosines and sines.

    Returns:
        ([head_dim / 2] fp32 on the CPU, factor). For `dynamic`, the frequencies up to the trained length.
    """
    plain = 1.0 / rope.theta ** _exponents(head_dim)
    match rope.type:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, head_dim), _yarn_attention_factor(rope)


def _exponents(head_dim: int) -> Tensor:
    """[head_dim / 2] fp32: 0, 2 / head_dim, 4 / head_dim, …"""
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow pairs are scaled, fast ones kept, with a linear blend between them (Llama 3.1 model card)."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)  # full turns over the trained length
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """NTK by parts (Peng et al. 2023, arXiv:2309.00071, section 3.2): a ramp over dimensions, not turns."""

    def dimension_of(turns: float) -> float:
        """The (fractional) dimension whose pair makes `turns` turns over the trained length."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    tokens_per_radian = rope.theta ** _exponents(head_dim)
    return stretched / (rope.factor * tokens_per_radian) + (1 - stretched) / tokens_per_radian


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Temperature of the attention as a factor on cos and sin (same paper, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
