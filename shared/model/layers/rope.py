"""Rotary position encoding: the angles of every token, for each type of context extension."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from shared.model.config.layer_config import Temperature
from shared.model.config.model_config import ModelConfig, RopeConfig


class Rotary:
    """Cosines and sines for the tokens of a step, for each of the encodings that a model's layers have.

    For most types a token's angles depend on its position alone. Dynamic NTK increases the base with the length of the
    text read at once, LongRoPE takes other factors beyond the trained length, so there a token also needs that length:
    n for every token of a prompt of n tokens, however it is chunked, and p + 1 for a generated one at position p. This
    equals generation with a growing cache, and it keeps cached keys valid.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        """Compute the frequencies; `dtype` is that of the returned cosines and sines."""
        self._encodings: list[_Encoding | _Factors] = [
            # Of a stage whose layers all have states nothing asks for angles.
            *(_Encoding(rope, config.rotary_dim, device) for rope in config.ropes or (None,)),
            *(_Factors(temperature, config.rotary_dim) for temperature in config.temperatures),
        ]
        self._dtype = dtype

    @property
    def num_encodings(self) -> int:
        """Encodings that `cos_sin` gives angles of."""
        return len(self._encodings)

    @property
    def needs_lengths(self) -> bool:
        """Whether `cos_sin` needs the lengths."""
        return any(encoding.needs_lengths for encoding in self._encodings)

    def cos_sin(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Angles of each token.

        Args:
            positions: [num_tokens] int64.
            lengths: [num_tokens] int64, see the class; read only if `needs_lengths`. A length below
                the trained one counts as the trained one.

        Returns:
            (cos, sin), both [num_encodings, num_tokens, rotary_dim] in the model's dtype, computed in fp32, both halves
            equal; the encodings in the order of `ModelConfig.ropes`, behind them the factors of
            `ModelConfig.temperatures` as cosines.
        """
        assert positions.dim() == 1
        if self.needs_lengths:
            assert lengths is not None
            assert lengths.shape == positions.shape
        both = [encoding.cos_sin(positions, lengths) for encoding in self._encodings]
        cos, sin = (torch.stack(parts) if len(parts) > 1 else parts[0][None] for parts in zip(*both, strict=True))
        return cos.to(self._dtype), sin.to(self._dtype)


class _Encoding:
    """One encoding of positions; None: angles of zero."""

    def __init__(self, rope: RopeConfig | None, rotary_dim: int, device: torch.device | str) -> None:
        self._rope = rope or RopeConfig(share=0.0)
        self._num_kept = (rotary_dim - self._rope.rotated(rotary_dim)) // 2
        """Pairs that are not rotated, the last ones."""
        dim = rotary_dim - 2 * self._num_kept
        self._exponents = _exponents(dim).to(device)  # [dim / 2]
        frequencies, self._scale = inverse_frequencies(self._rope, dim)
        self._frequencies = frequencies.to(device)  # [dim / 2] fp32
        if self._rope.type == "longrope":
            long = torch.tensor(self._rope.long_factors) * self._rope.theta ** _exponents(dim)
            self._long = (1.0 / long).to(device)

    @property
    def needs_lengths(self) -> bool:
        """See `Rotary`."""
        return self._rope.needs_lengths

    def cos_sin(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, both [num_tokens, rotary_dim] fp32."""
        frequencies = self._frequencies
        if self.needs_lengths:
            assert lengths is not None
            frequencies = self._of_lengths(lengths)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        if self._num_kept:
            cos, sin = (
                functional.pad(part, (0, self._num_kept), value=value) for part, value in ((cos, 1.0), (sin, 0.0))
            )
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def _of_lengths(self, lengths: Tensor) -> Tensor:
        """[num_tokens] lengths to [num_tokens, dim / 2] frequencies."""
        rope, dim = self._rope, 2 * self._exponents.shape[0]
        trained = rope.original_max_position_embeddings
        if rope.type == "longrope":
            return torch.where((lengths > trained)[:, None], self._long, self._frequencies)
        stretch = rope.factor * lengths.clamp(min=trained) / trained - (rope.factor - 1)
        bases = rope.theta * stretch ** (dim / (dim - 2))
        return 1.0 / bases[:, None] ** self._exponents


class _Factors:
    """The factors of a temperature as an encoding: rotated by it, a query is multiplied."""

    needs_lengths = False

    def __init__(self, temperature: Temperature, rotary_dim: int) -> None:
        self._temperature = temperature
        self._dim = rotary_dim

    def cos_sin(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """See `_Encoding`."""
        found = self._temperature
        periods = ((positions + found.shift).float() / found.length).floor()
        factors = (1 + found.strength * torch.log1p(periods))[:, None].expand(-1, self._dim)
        return factors, torch.zeros_like(factors)


def rotary_order(config: ModelConfig) -> Tensor | None:
    """[head_dim] int64: the order of a head's dimensions in which the kernels rotate them, pairs (i, i + head_dim / 2);
    None where they have it. Dimensions that are not rotated are pairs of an angle of zero, behind the others.

    A product of query and key does not depend on the order, so it is that of the projections' rows.
    """
    dim = config.head_dim
    rotated = max((rope.rotated(dim) for rope in config.ropes if rope is not None), default=dim)
    if config.latent is not None or (rotated == dim and not config.is_interleaved):
        return None
    pairs = (
        torch.arange(rotated, device="cpu").view(-1, 2)
        if config.is_interleaved
        else torch.arange(rotated, device="cpu").view(2, -1).T
    )
    kept = torch.arange(rotated, dim, device="cpu").view(2, -1).T
    return torch.cat((pairs, kept)).T.flatten()


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
        case "longrope":
            stretched = torch.tensor(rope.short_factors) * rope.theta ** _exponents(head_dim)
            return 1.0 / stretched, _longrope_attention_factor(rope)
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


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """Factor on cosines and sines (Ding et al. 2024, arXiv:2402.13753, as Phi-3 was trained)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    trained = rope.original_max_position_embeddings
    return math.sqrt(1 + math.log(rope.factor) / math.log(trained)) if rope.factor > 1 else 1.0


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Temperature of the attention as a factor on cos and sin (same paper, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
