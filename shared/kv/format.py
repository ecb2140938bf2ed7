"""How the KV cache stores a token in a layer, independent of the model's compute dtype. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import InvalidRequest

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The supported KV dtypes, by their torch name."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """K and V of `num_kv_heads` heads, `head_dim` elements each, without scales; or one latent, which is both.

    All code that depends on the storage of a token uses the members below: the pool's memory and shape, transfers and
    checksums use the bytes, roots of hash chains the name, kernels shape and dtype. A quantised format would count its
    scales in `layer_bytes` and identify itself in `name`.

    Raises InvalidRequest naming the field that is out of bounds.
    """

    dtype: str
    """Dtype of the elements, one of `BYTES_PER_ELEMENT`."""
    num_kv_heads: int
    head_dim: int
    num_planes: int = 2
    """2: keys, then values. 1: a row is key and value at once, as the latents of latent attention are."""

    def __post_init__(self) -> None:
        check_dimension("num_kv_heads", self.num_kv_heads)
        check_dimension("head_dim", self.head_dim)
        check_dimension("num_planes", self.num_planes)
        if self.num_planes > 2:
            raise InvalidRequest(f"num_planes must be 1 or 2, not {self.num_planes}", field="num_planes", limit=2)
        if self.dtype not in BYTES_PER_ELEMENT:
            known = ", ".join(BYTES_PER_ELEMENT)
            raise InvalidRequest(f"dtype must be one of {known}, not {self.dtype!r}", field="dtype", limit=known)

    @property
    def name(self) -> str:
        """Part of every chain's root: formats that encode differently have different names."""
        return self.dtype if self.num_planes == 2 else f"{self.dtype}-latent"

    def layer_shape(self, block_size: int) -> tuple[int, int, int, int]:
        """Shape of one layer of a block: `[num_planes, num_kv_heads, block_size, head_dim]`; two planes: K, then V."""
        return (self.num_planes, self.num_kv_heads, block_size, self.head_dim)

    def layer_bytes(self, block_size: int) -> int:
        """Bytes of one layer of a block of `block_size` tokens."""
        return self.num_planes * self.num_kv_heads * block_size * self.head_dim * BYTES_PER_ELEMENT[self.dtype]

    def describe(self) -> str:
        """A text for logs and error messages."""
        if self.num_planes == 1:
            return f"latents of {self.head_dim} dims, {self.dtype}"
        return f"{self.num_kv_heads} KV heads x {self.head_dim} dims, {self.dtype}"


def check_dimension(name: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name} must be an integer of at least 1, not {value!r}", field=name, limit=1)
