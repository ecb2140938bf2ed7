"""The part of a model's `config.json` that describes layers with a state: the gated delta rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.kernels.delta_sizes import DeltaSizes, PartPlaces
from shared.model.config.json_fields import JsonFields

STATE_ELEMENT_BYTES = 4
"""States are kept in fp32, whatever the dtype of the model and of its KV."""


MOST_PARTS = 8
"""Parts of a state beside latents: the latents of a block, of 16 tokens and more, are cut into that many parts of whole
numbers."""


@dataclass(frozen=True)
class DeltaConfig(DeltaSizes):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), behind a short convolution.

    Of all tokens before it a layer keeps one matrix a head, and the last inputs of its convolution.
    """

    is_by_head: (
        bool  # whether a checkpoint has the projections' rows by key head, in two tensors; else by part, in four
    )
    low_rank: int = 0  # of the decays' and the gates' projections; 0: they have none
    places: PartPlaces | None = None  # of states beside latents, as `DeltaLayer`

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of a layer's projections."""
        of_hidden = self.projected_size + self.value_size
        if self.low_rank:
            of_hidden += 2 * self.low_rank - self.decay_size - self.value_size
        return hidden_size * of_hidden + self.low_rank * (self.decay_size + self.value_size)

    @property
    def state_bytes(self) -> int:
        """Bytes of `state_elements`."""
        return self.state_elements * STATE_ELEMENT_BYTES

    @classmethod
    def parse_by_channel(cls, fields: JsonFields) -> DeltaConfig:
        """Read Kimi delta attention: `linear_attn_config`, or the `linear_…` fields.

        Raises:
            ModelLoadError: a missing or wrong field; `field` names it.
        """
        _check_activation(fields)
        own = fields.child("linear_attn_config")
        found, names = fields, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        if own is not None:
            found, names = own, ("num_heads", "head_dim", "short_conv_kernel_size")
        heads, dim, kernel = (
            found.integer(name, default=default) for name, default in zip(names, (32, 128, 4), strict=True)
        )
        parts = math.gcd(heads, MOST_PARTS)
        places = PartPlaces(0, parts, parts)
        return cls(heads, heads, dim, dim, kernel, is_by_channel=True, is_by_head=False, low_rank=dim, places=places)

    @classmethod
    def parse(cls, fields: JsonFields, *, is_by_head: bool) -> DeltaConfig:
        """Read the `linear_…` fields.

        Raises:
            ModelLoadError: a missing or wrong field; `field` names it.
        """
        _check_activation(fields)
        num_key_heads = fields.integer("linear_num_key_heads", default=16)
        num_value_heads = fields.integer("linear_num_value_heads", default=32)
        if num_value_heads % num_key_heads:
            raise fields.fault(
                "linear_num_value_heads", f"must be a multiple of {num_key_heads} key heads, found {num_value_heads}"
            )
        return cls(
            num_key_heads,
            num_value_heads,
            fields.integer("linear_key_head_dim", default=128),
            fields.integer("linear_value_head_dim", default=128),
            fields.integer("linear_conv_kernel_dim", default=4),
            is_by_channel=False,
            is_by_head=is_by_head,
        )


def _check_activation(fields: JsonFields) -> None:
    """Raises ModelLoadError where the convolution passes anything but a SiLU."""
    found = fields.text("hidden_act", default="silu")
    if found != "silu":
        raise fields.fault("hidden_act", f"{found!r} is not supported beside layers with a state; supported: silu")
