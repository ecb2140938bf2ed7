"""The position-encoding part of a model's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from shared.model.config.json_fields import JsonFields

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

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
    short_factors: tuple[float, ...] = ()  # longrope: of each rotated pair, up to the trained length
    long_factors: tuple[float, ...] = ()  # longrope: of each rotated pair, beyond it
    share: float = 1.0  # of a head that is rotated, its first dimensions

    @property
    def needs_lengths(self) -> bool:
        """Whether a token's angles follow from the length of the text read at once, beside its position."""
        return self.type in ("dynamic", "longrope")

    def rotated(self, head_dim: int) -> int:
        """Elements of a head that are rotated."""
        return int(head_dim * self.share)

    @classmethod
    def parse(
        cls,
        config: JsonFields,
        max_position_embeddings: int,
        kind: str | None = None,
        *,
        theta: float = DEFAULT_THETA,
        share: float | None = None,
    ) -> RopeConfig:
        """Read `rope_scaling` (with a separate `rope_theta`) or `rope_parameters` (which has both).

        Args:
            config: the fields of `config.json`.
            max_position_embeddings: tokens.
            kind: of the layers meant, where `rope_parameters` has an object for each kind.
            theta: where the file has none.
            share: of a head that the family rotates where the file does not say; None: all of it, always.

        Raises:
            ModelLoadError: unsupported type, partial rotation, or a missing or wrong field; `field` names it.
        """
        rope = config.child("rope_scaling") or config.child("rope_parameters") or JsonFields({}, "config.json")
        if kind is not None:
            rope = rope.child(kind) or rope
        theta = rope.number("rope_theta", default=config.number("rope_theta", default=theta))
        rope_type = rope.text("rope_type", default=rope.text("type", default="default"))
        if rope_type not in get_args(RopeType):
            known = ", ".join(get_args(RopeType))
            raise rope.fault("rope_type", f"{rope_type!r} is not supported; supported: {known}")
        share = _share(rope, config, share)
        if rope_type == "default":
            return cls(theta=theta, share=share)

        trained = max_position_embeddings
        if rope_type in ("llama3", "yarn", "longrope"):
            trained = rope.integer("original_max_position_embeddings", default=max_position_embeddings, minimum=2)
            trained = config.integer("original_max_position_embeddings", default=trained, minimum=2)
        # A null factor in such a config means the ratio of the two lengths.
        implied = max_position_embeddings / trained if rope_type in ("yarn", "longrope") else None
        fields = cls(
            type=cast(RopeType, rope_type),
            theta=theta,
            factor=rope.number("factor") if implied is None else rope.number("factor", default=implied),
            original_max_position_embeddings=trained,
            share=share,
        )
        if rope_type == "longrope":
            return _with_longrope(fields, rope)
        if rope_type == "llama3":
            return _with_llama3(fields, rope)
        return _with_yarn(fields, rope) if rope_type == "yarn" else fields


def _share(rope: JsonFields, config: JsonFields, share: float | None) -> float:
    for owner in (rope, config):
        found = owner.optional_number("partial_rotary_factor")
        if share is None and found not in (None, 1.0):
            raise owner.fault("partial_rotary_factor", "other than 1 is not supported for this architecture")
        if found is not None:
            if found > 1:
                raise owner.fault("partial_rotary_factor", f"must be at most 1, found {found}")
            return found
    return 1.0 if share is None else share


def _with_longrope(base: RopeConfig, rope: JsonFields) -> RopeConfig:
    return replace(
        base,
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        attention_factor=rope.optional_number("attention_factor"),
    )


def _with_llama3(base: RopeConfig, rope: JsonFields) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.fault("high_freq_factor", f"must be above low_freq_factor ({low}), found {high}")
    return replace(base, low_freq_factor=low, high_freq_factor=high)


def _with_yarn(base: RopeConfig, rope: JsonFields) -> RopeConfig:
    if base.theta == 1:
        raise rope.fault("rope_theta", "must not be 1 with yarn: all pairs would turn alike")
    return replace(
        base,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", default=True),
    )
