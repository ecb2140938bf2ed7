"""What a GGUF file says of positions, as `config.json` says it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from shared.model.config.rope_config import DEFAULT_THETA, RopeConfig
from shared.model.gguf.architectures import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS
from shared.model.gguf.metadata import Metadata
from shared.model.layers.rope import inverse_frequencies

_TRAINED, _LOW, _HIGH = 8192, 1.0, 4.0
"""Llama 3's: tokens of its first length, and turns over these below and above which frequencies are scaled and not."""


def positions_of(fields: Metadata, rotated: int) -> dict[str, Any]:
    """Their base, and how they are scaled, if they are. Raises ModelLoadError (`field`) for what is not served.

    Args:
        fields: of the file.
        rotated: elements of a head that encode positions.
    """
    scaling = _scaling(fields, rotated)
    base = {"rope_theta": fields.number("rope.freq_base", DEFAULT_THETA)}
    return base if scaling is None else {**base, "rope_scaling": scaling}


def _scaling(fields: Metadata, rotated: int) -> dict[str, Any] | None:
    factors = fields.header.numbers(FREQUENCY_FACTORS)
    short, long = (fields.header.numbers(name) for name in (SHORT_FACTORS, LONG_FACTORS))
    by_length = short is not None or long is not None
    kind = fields.own("rope.scaling.type", "none")
    if by_length and factors is None and kind in ("none", "longrope"):
        return _longrope(fields, rotated, short, long)
    if by_length:
        raise fields.fault(LONG_FACTORS, f"is there beside other factors or a scaling of type {kind}")
    if factors is not None:
        if kind != "none":
            raise fields.fault(fields.prefix + "rope.scaling.type", f"is {kind} beside {FREQUENCY_FACTORS}")
        return _llama3(fields, rotated, factors)
    if kind == "none":
        return None
    name = fields.prefix + "rope.scaling.type"
    if kind not in ("linear", "yarn"):
        raise fields.fault(name, f"is {kind}, which is not supported in GGUF; supported: none, linear, yarn")
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.fault(fields.prefix + "rope.scaling.attn_factor", "other than 1 is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.size("rope.scaling.original_context_length")
        scaling["truncate"] = fields.prefix != "gpt-oss."  # its ramp ends between dimensions
    return scaling


def _checked(fields: Metadata, name: str, factors: list[float] | None, rotated: int) -> list[float]:
    if factors is None or len(factors) != rotated // 2 or not all(0 < number < math.inf for number in factors):
        raise fields.fault(name, f"must be {rotated // 2} numbers above 0")
    return factors


def _longrope(fields: Metadata, rotated: int, short: list[float] | None, long: list[float] | None) -> dict[str, Any]:
    """LongRoPE's scaling (Phi 3 and 4): factors of their own up to the trained length and beyond it."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _checked(fields, SHORT_FACTORS, short, rotated),
        "long_factor": _checked(fields, LONG_FACTORS, long, rotated),
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
    }
    factor = fields.number("rope.scaling.attn_factor", 0.0)
    return {**scaling, "attention_factor": factor} if factor else scaling


def _llama3(fields: Metadata, rotated: int, factors: list[float]) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, of which a file has what it comes to: what each frequency is divided by."""
    _checked(fields, FREQUENCY_FACTORS, factors, rotated)
    plain = RopeConfig(theta=fields.number("rope.freq_base", DEFAULT_THETA))
    scaled = replace(
        plain, type="llama3", factor=max(factors), original_max_position_embeddings=_TRAINED,
        low_freq_factor=_LOW, high_freq_factor=_HIGH,
    )  # fmt: skip
    (before, _), (after, _) = (inverse_frequencies(rope, rotated) for rope in (plain, scaled))
    if not torch.allclose(before / after, torch.tensor(factors), rtol=1e-3, atol=0.0):
        raise fields.fault(FREQUENCY_FACTORS, "are not those of Llama 3, which alone are supported in GGUF")
    return {
        "rope_type": "llama3", "factor": scaled.factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _TRAINED,
    }  # fmt: skip
