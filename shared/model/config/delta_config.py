"""The part of a model's `config.json` that describes layers with a state: the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from shared.model.config.json_fields import JsonFields

STATE_ELEMENT_BYTES = 4
"""States are kept in fp32, whatever the dtype of the model and of its KV."""


@dataclass(frozen=True)
class DeltaConfig:
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), behind a short convolution.

    Of all tokens before it a layer keeps one matrix a head, and the last inputs of its convolution.
    """

    num_key_heads: int
    num_value_heads: int  # a multiple: each key head serves adjacent value heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    kernel_size: int  # tokens that the convolution sees, the newest among them
    is_by_head: (
        bool  # whether a checkpoint has the projections' rows by key head, in two tensors; else by part, in four
    )

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of all values of a token, and of their gates."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def matrix_elements(self) -> int:
        """Of all heads' matrices of one layer."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_elements(self) -> int:
        """Numbers that a layer keeps of a sequence: the matrices, then the convolution's last inputs."""
        return self.matrix_elements + self.mixed_size * (self.kernel_size - 1)

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
