"""The shape of a KV block, agreed on by every worker of a cluster.

One tensor a worker, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block is one
contiguous run of bytes over all layers, so that one message moves it and one checksum covers it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shared.errors import InvalidRequest, ModelMismatch

LAYOUT_VERSION = 1
"""Raised whenever the meaning of a block's bytes changes; part of every chain's root."""

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The KV dtypes there are, by their torch name."""

CHECKSUM_WORD_BYTES = 8
"""A block is checked in words of this many bytes and must be a multiple of it."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Dimensions and dtype of one block. Raises InvalidRequest naming the field that is out of bounds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: str
    """One of `BYTES_PER_ELEMENT`."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequest(f"{name} must be an integer of at least 1, not {value!r}", field=name, limit=1)
        if self.dtype not in BYTES_PER_ELEMENT:
            known = ", ".join(BYTES_PER_ELEMENT)
            raise InvalidRequest(f"dtype must be one of {known}, not {self.dtype!r}", field="dtype", limit=known)
        if self.block_bytes % CHECKSUM_WORD_BYTES:
            raise InvalidRequest(
                f"block_size {self.block_size} gives blocks of {self.block_bytes} bytes, "
                f"which is no multiple of {CHECKSUM_WORD_BYTES}",
                field="block_size",
                limit=CHECKSUM_WORD_BYTES,
            )

    @property
    def num_elements(self) -> int:
        """K and V elements in one block, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_elements * BYTES_PER_ELEMENT[self.dtype]

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; index 2 is K then V."""
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def describe(self) -> str:
        """One line for logs and error messages."""
        return (
            f"{self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim} dims, "
            f"{self.block_size} tokens a block, {self.dtype}, {self.block_bytes} bytes a block"
        )

    def ensure_compatible(self, other: BlockLayout) -> None:
        """Raise ModelMismatch, naming every differing field, unless both lay blocks out the same."""
        differing = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        if differing:
            parts = [f"{name} {getattr(self, name)} here, {getattr(other, name)} there" for name in differing]
            raise ModelMismatch(f"block layouts differ: {'; '.join(parts)}", field=",".join(differing))
