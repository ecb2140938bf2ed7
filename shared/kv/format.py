"""How the KV cache stores a token in a layer, independent of the model's compute dtype. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import InvalidRequest

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The supported KV dtypes, by their torch name."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """K and V of `num_kv_heads` heads, `head_dim` elements each, without scales.

    All code that depends on the storage of a token uses the members below: the pool's memory and shape, transfers and
    checksums use the bytes, roots of hash chains the name, kernels shape and dtype. A quantised format would count its
    scales in `layer_bytes` and identify itself in `name`; one of latent attention would have
    `[block_size, latent width]` as its `layer_shape`.

    Raises InvalidRequest naming the field that is out of bounds.
    """

    dtype: str
    """Dtype of the elements, one of `BYTES_PER_ELEMENT`."""
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        check_dimension("num_kv_heads", self.num_kv_heads)
        check_dimension("head_dim", self.head_dim)
        if self.dtype not in BYTES_PER_ELEMENT:
            known = ", ".join(BYTES_PER_ELEMENT)
            raise InvalidRequest(f"dtype must be one of {known}, not {self.dtype!r}", field="dtype", limit=known)

    @property
    def name(self) -> str:
        """Part of every chain's root: formats that encode differently have different names."""
        return self.dtype

    def layer_shape(self, block_size: int) -> tuple[int, int, int, int]:
        """Shape of one layer of a block: `[2, num_kv_heads, block_size, head_dim]`, K then V."""
        return (2, self.num_kv_heads, block_size, self.head_dim)

    def layer_bytes(self, block_size: int) -> int:
        """Bytes of one layer of a block of `block_size` tokens."""
        return 2 * self.num_kv_heads * block_size * self.head_dim * BYTES_PER_ELEMENT[self.dtype]

    def describe(self) -> str:
        """A text for logs and error messages."""
        return f"{self.num_kv_heads} KV heads x {self.head_dim} dims, {self.dtype}"


def check_dimension(name: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name} must be an integer of at least 1, not {value!r}", field=name, limit=1)
