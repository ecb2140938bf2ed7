"""The position-encoding part of a model's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from shared.model.config.json_fields import JsonFields

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

DEFAULT_THETA = 10_000.0  # for checkpoints that predate the field


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding and its extension beyond the trained length.

    Fields that a type does not use keep their defaults.
    """

    type: RopeType = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0  # scale of the context, all types but default
    original_max_position_embeddings: int = 0  # trained length in tokens: dynamic, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn: scale of cos and sin, derived from factor if None
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ramp's bounds to whole dimensions

    @classmethod
    def parse(cls, config: JsonFields, max_position_embeddings: int) -> RopeConfig:
        """Read `rope_scaling` (with a separate `rope_theta`) or `rope_parameters` (which has both).

        Raises:
            ModelLoadError: unsupported type, partial rotation, or a missing or wrong field; `field` names it.
        """
        rope = config.child("rope_scaling") or config.child("rope_parameters") or JsonFields({}, "config.json")
        theta = rope.number("rope_theta", default=config.number("rope_theta", default=DEFAULT_THETA))
        rope_type = rope.text("rope_type", default=rope.text("type", default="default"))
        if rope_type not in get_args(RopeType):
            known = ", ".join(get_args(RopeType))
            raise rope.fault("rope_type", f"{rope_type!r} is not supported; supported: {known}")
        for owner in (rope, config):
            if owner.number("partial_rotary_factor", default=1.0) != 1.0:
                raise owner.fault("partial_rotary_factor", "other than 1 is not supported")
        if rope_type == "default":
            return cls(theta=theta)

        trained = max_position_embeddings
        if rope_type in ("llama3", "yarn"):
            trained = rope.integer("original_max_position_embeddings", default=max_position_embeddings)
            trained = config.integer("original_max_position_embeddings", default=trained)
        # A null factor in a YaRN config means the ratio of the two lengths.
        implied = max_position_embeddings / trained if rope_type == "yarn" else None
        fields = cls(
            type=cast(RopeType, rope_type),
            theta=theta,
            factor=rope.number("factor") if implied is None else rope.number("factor", default=implied),
            original_max_position_embeddings=trained,
        )
        if rope_type == "llama3":
            return _with_llama3(fields, rope)
        return _with_yarn(fields, rope) if rope_type == "yarn" else fields


def _with_llama3(base: RopeConfig, rope: JsonFields) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.fault("high_freq_factor", f"must be above low_freq_factor ({low}), found {high}")
    return replace(base, low_freq_factor=low, high_freq_factor=high)


def _with_yarn(base: RopeConfig, rope: JsonFields) -> RopeConfig:
    return replace(
        base,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", default=True),
    )
