"""The part of a model's `config.json` that describes multi-head latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.model.config.json_fields import JsonFields
from shared.model.config.rope_config import RopeConfig


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    Of a token the cache keeps one latent, from which the keys and values of all heads follow, and one rotated key that
    all heads share.
    """

    q_rank: int | None  # of the query's own latent; None: queries are projected at once
    kv_rank: int  # elements of the latent
    nope_dim: int  # of a head's query and key without positions
    rope_dim: int  # with rotary positions
    value_dim: int  # of a head
    is_interleaved: bool  # whether rotated pairs are (2i, 2i + 1) in the weights, else (i, i + rope_dim / 2)
    scale: float  # on query · key

    @property
    def query_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Values that the cache keeps of a token in a layer."""
        return self.kv_rank + self.rope_dim

    @classmethod
    def parse(cls, fields: JsonFields, rope: RopeConfig | None, *, is_interleaved: bool) -> LatentConfig:
        """The latent attention in `config.json`; `rope`: None where positions are not encoded.

        Raises:
            ModelLoadError: a missing or wrong field; `field` names it.
        """
        rope_dim = fields.integer("qk_rope_head_dim")
        if rope_dim % 2:
            raise fields.fault("qk_rope_head_dim", f"must be even for rotary positions, found {rope_dim}")
        nope_dim = fields.integer("qk_nope_head_dim")
        return cls(
            q_rank=fields.optional_integer("q_lora_rank"),
            kv_rank=fields.integer("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=fields.integer("v_head_dim"),
            is_interleaved=is_interleaved,
            scale=(nope_dim + rope_dim) ** -0.5 * _temperature(rope) ** 2,
        )


def _temperature(rope: RopeConfig | None) -> float:
    """Factor on query and key each by which YaRN's longer context sharpens attention, where the model asks for it."""
    if rope is None or rope.type != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
