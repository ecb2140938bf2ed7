"""The shape of a KV block, the same for every worker of a cluster.

One tensor a worker, `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`: a block is contiguous
over all layers, so that one message moves it and one checksum covers it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shared.errors import InvalidRequest, ModelMismatch
from shared.kv.format import KVFormat, check_dimension

LAYOUT_VERSION = 1
"""Increased whenever the meaning of a block's bytes changes; part of every chain's root."""

CHECKSUM_WORD_BYTES = 8
"""Word size of the checksum; the size of a block must be a multiple of it."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Dimensions of one block, and the format of its KV.

    Raises InvalidRequest naming the field that is out of bounds.
    """

    num_layers: int
    block_size: int
    """Tokens a block."""
    format: KVFormat

    def __post_init__(self) -> None:
        check_dimension("num_layers", self.num_layers)
        check_dimension("block_size", self.block_size)
        if self.block_bytes % CHECKSUM_WORD_BYTES:
            raise InvalidRequest(
                f"block_size {self.block_size} gives blocks of {self.block_bytes} bytes, "
                f"which is not a multiple of {CHECKSUM_WORD_BYTES}",
                field="block_size",
                limit=CHECKSUM_WORD_BYTES,
            )

    @property
    def dtype(self) -> str:
        """Torch name of the dtype of K and V; the compute dtype may differ."""
        return self.format.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_layers * self.format.layer_bytes(self.block_size)

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """`[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`; of two planes K, then V."""
        return (num_blocks, self.num_layers, *self.format.layer_shape(self.block_size))

    def describe(self) -> str:
        """One line for logs and error messages."""
        return (
            f"{self.num_layers} layers x {self.format.describe()}, {self.block_size} tokens a block, "
            f"{self.block_bytes} bytes a block"
        )

    def ensure_compatible(self, other: BlockLayout) -> None:
        """Raise ModelMismatch, naming every differing field, unless both lay blocks out the same."""
        pairs = [
            (f.name, getattr(ours, f.name), getattr(theirs, f.name))
            for ours, theirs in ((self, other), (self.format, other.format))
            for f in fields(ours)
            if f.name != "format"
        ]
        differing = [(name, here, there) for name, here, there in pairs if here != there]
        if differing:
            parts = [f"{name} {here} here, {there} there" for name, here, there in differing]
            raise ModelMismatch(
                f"block layouts differ: {'; '.join(parts)}", field=",".join(name for name, _, _ in differing)
            )
