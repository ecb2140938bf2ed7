"""Sizes of the gated delta rule with its convolution, and of the state that it keeps. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartPlaces:
    """The parts that hold a rank's states, of the equal ones into which the memory of a KV head that all ranks read is
    cut."""

    first: int
    count: int
    total: int


@dataclass(frozen=True, eq=False, slots=True)
class DeltaSizes:
    """Sizes of one layer, or of some of its key heads with the value heads that they serve."""

    num_key_heads: int  # each serves adjacent value heads, equally many
    num_value_heads: int  # that have a matrix each
    key_dim: int  # of a head
    value_dim: int  # of a head
    kernel_size: int  # tokens that the convolution sees, the newest among them
    is_by_channel: (
        bool  # Kimi delta attention: each channel of a key decays by itself, gates pass a sigmoid, not a SiLU
    )

    @property
    def key_size(self) -> int:
        """Elements of a token's keys, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of a token's values, of its gates, and of the result."""
        return self.num_value_heads * self.value_dim

    @property
    def decay_size(self) -> int:
        """Decays of a token."""
        return self.num_value_heads * (self.key_dim if self.is_by_channel else 1)

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def projected_size(self) -> int:
        """Columns of what the projections give: queries, keys, values, gates, rates, decays."""
        return self.mixed_size + self.value_size + self.num_value_heads + self.decay_size

    @property
    def matrix_elements(self) -> int:
        """Numbers of all heads' matrices."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_elements(self) -> int:
        """Numbers that a layer keeps of a sequence: the matrices, then the convolution's last inputs."""
        return self.matrix_elements + self.mixed_size * (self.kernel_size - 1)
