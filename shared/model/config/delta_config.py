"""The part of a model's `config.json` that describes layers with a state: the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kernels.delta_sizes import DeltaSizes
from shared.model.config.json_fields import JsonFields

STATE_ELEMENT_BYTES = 4
"""States are kept in fp32, whatever the dtype of the model and of its KV."""


@dataclass(frozen=True)
class DeltaConfig(DeltaSizes):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), behind a short convolution.

    Of all tokens before it a layer keeps one matrix a head, and the last inputs of its convolution.
    """

    is_by_head: (
        bool  # whether a checkpoint has the projections' rows by key head, in two tensors; else by part, in four
    )

    @property
    def state_bytes(self) -> int:
        """Of `state_elements`."""
        return self.state_elements * STATE_ELEMENT_BYTES

    @classmethod
    def parse(cls, fields: JsonFields, *, is_by_head: bool) -> DeltaConfig:
        """Read the `linear_…` fields.

        Raises:
            ModelLoadError: a missing or wrong field; `field` names it.
        """
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
            is_by_head,
        )
