"""The shape of a KV block, the same for every worker of a cluster.

A worker's pool is bytes, `[num_blocks, num_layers, num_planes, num_kv_heads, head_bytes]`: a block is contiguous over
all layers of its group, so that one message moves it and one checksum covers it. A head's run holds the rows of the
block's tokens, one behind the other; where they are codes, the tokens' scales follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from shared.errors import InvalidRequest, ModelMismatch
from shared.kv.groups import KVGroups

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
"""The supported KV dtypes, by their torch name."""
CODES = ("int8", "float8_e4m3fn")
"""Dtypes whose elements are codes: each token and head has a scale in fp32, from its own numbers alone."""
WIDE = ("float32", "bfloat16")
"""Dtypes that are converted to codes where a prefill worker keeps them and a decode worker does not."""
SCALE_BYTES = 4
LAYOUT_VERSION = 1
"""Increased whenever the meaning of a block's bytes changes; part of every chain's root."""
CHECKSUM_WORD_BYTES = 8
"""Word size of the checksum; the size of a block must be a multiple of it."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """K and V of `num_kv_heads` heads, `head_dim` elements each, codes with their scales; or one latent, which is both.

    All code that depends on the storage of a token uses the members below: the pool's memory and shape, transfers and
    checksums use the bytes, roots of hash chains the name; kernels take a `PoolView`.

    Raises InvalidRequest naming the field that is out of bounds.
    """

    dtype: str
    """Dtype of the elements, one of `BYTES_PER_ELEMENT`."""
    num_kv_heads: int
    head_dim: int
    num_planes: int = 2
    """2: keys, then values. 1: a row is key and value at once, as the latents of latent attention are."""
    source: str = ""
    """On a decode worker the dtype in which prefill workers keep prompts, whose blocks they convert to `dtype` as they
    send them. Empty: prompts come as they would be computed here."""
    sent: str = ""
    """On a prefill worker the codes to which its blocks are converted for decode workers. Empty: they are sent as they
    are."""

    def __post_init__(self) -> None:
        check_dimension("num_kv_heads", self.num_kv_heads)
        check_dimension("head_dim", self.head_dim)
        check_dimension("num_planes", self.num_planes)
        if self.num_planes > 2:
            raise InvalidRequest(f"num_planes must be 1 or 2, not {self.num_planes}", field="num_planes", limit=2)
        if self.dtype not in BYTES_PER_ELEMENT:
            known = ", ".join(BYTES_PER_ELEMENT)
            raise InvalidRequest(f"dtype must be one of {known}, not {self.dtype!r}", field="dtype", limit=known)
        if self.has_scales and self.num_planes == 1:
            known = ", ".join(name for name in BYTES_PER_ELEMENT if name not in CODES)
            raise InvalidRequest(f"latents are not kept in {self.dtype}, only in {known}", field="dtype", limit=known)
        self._check_pair()

    def _check_pair(self) -> None:
        wide, codes = self.source or self.dtype, self.sent or self.dtype
        if (self.source or self.sent) and (
            wide not in WIDE or codes not in CODES or self.num_planes == 1 or (self.source and self.sent)
        ):
            raise InvalidRequest(
                f"{'latents' if self.num_planes == 1 else 'blocks'} in {wide} are not converted to {codes}: keys and "
                f"values in {' and '.join(WIDE)} are, to {' and '.join(CODES)}",
                field="source" if self.source else "sent",
                limit=", ".join(CODES),
            )

    @property
    def has_scales(self) -> bool:
        """Whether elements are codes."""
        return self.dtype in CODES

    @property
    def name(self) -> str:
        """Part of every chain's root: formats that encode differently have different names. What was converted is not
        what a worker would have computed in that dtype: `int8<bfloat16`."""
        converted = f"{self.dtype}<{self.source}" if self.source else self.dtype
        return converted if self.num_planes == 2 else f"{converted}-latent"

    @property
    def is_converted(self) -> bool:
        """Whether prefill and decode workers keep prompts in different formats, of which this is one."""
        return bool(self.source or self.sent)

    @property
    def computed(self) -> KVFormat:
        """Format of the workers which compute prompts for a worker of this format."""
        return replace(self, dtype=self.source, source="", sent=self.dtype) if self.source else self

    @property
    def handed_off(self) -> KVFormat:
        """Format in which this format's blocks reach a decode worker."""
        return replace(self, dtype=self.sent, source=self.dtype, sent="") if self.sent else self

    def head_bytes(self, block_size: int) -> int:
        """Bytes of one head's keys, or values, in one layer of a block of `block_size` tokens."""
        row_bytes = self.head_dim * BYTES_PER_ELEMENT[self.dtype] + (SCALE_BYTES if self.has_scales else 0)
        return block_size * row_bytes

    def layer_shape(self, block_size: int) -> tuple[int, int, int]:
        """One layer of a block: `[num_planes, num_kv_heads, head_bytes]` bytes; of two planes K, then V."""
        return (self.num_planes, self.num_kv_heads, self.head_bytes(block_size))

    def layer_bytes(self, block_size: int) -> int:
        """Bytes of one layer of a block of `block_size` tokens."""
        return math.prod(self.layer_shape(block_size))

    def describe(self) -> str:
        """A text for logs and error messages."""
        if self.num_planes == 1:
            return f"latents of {self.head_dim} dims, {self.dtype}"
        return f"{self.num_kv_heads} KV heads x {self.head_dim} dims, {self.name}"


def check_dimension(name: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name} must be an integer of at least 1, not {value!r}", field=name, limit=1)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Dimensions of one block, and the format of its KV.

    Raises InvalidRequest naming the field that is out of bounds.
    """

    num_layers: int
    """Layers for which a block has room: those of the largest group."""
    block_size: int
    """Tokens a block."""
    format: KVFormat
    windows: tuple[int | None, ...] = (None,)
    """The window of each KV group, as `KVGroups` has them."""
    num_states: int = 0
    """Number of groups, the last ones, whose blocks hold states, as in `KVGroups`."""

    def __post_init__(self) -> None:
        check_dimension("num_layers", self.num_layers)
        check_dimension("block_size", self.block_size)
        check_dimension("number of windows", len(self.windows))
        for window in self.windows:
            if window is not None:
                check_dimension("windows", window)
        if not 0 <= self.num_states < len(self.windows):
            raise InvalidRequest(
                f"num_states must be from 0 to {len(self.windows) - 1}, not {self.num_states}",
                field="num_states",
                limit=len(self.windows) - 1,
            )
        # The words of a checksum lie in one head, behind whose codes its scales then begin at a multiple of 4 bytes.
        what = "heads" if self.format.has_scales else "blocks"
        num_bytes = self.format.head_bytes(self.block_size) if self.format.has_scales else self.block_bytes
        if num_bytes % CHECKSUM_WORD_BYTES:
            raise InvalidRequest(
                f"block_size {self.block_size} gives {what} of {num_bytes} bytes, "
                f"which is not a multiple of {CHECKSUM_WORD_BYTES}",
                field="block_size",
                limit=CHECKSUM_WORD_BYTES,
            )

    @property
    def dtype(self) -> str:
        """Torch name of the dtype of K and V; the compute dtype may differ."""
        return self.format.dtype

    @property
    def groups(self) -> KVGroups:
        """What each group keeps."""
        return KVGroups(self.block_size, self.windows, self.num_states)

    @property
    def name(self) -> str:
        """Part of every chain's root: that of the format, and the groups where not all layers are in one that keeps
        everything."""
        if self.groups.is_plain:
            return self.format.name
        states = f"s{self.num_states}h" if self.num_states else ""  # h: the parts of a state lie by KV head
        return f"{self.format.name}-{self.num_layers}x{','.join(str(window or 0) for window in self.windows)}{states}"

    @property
    def computed(self) -> BlockLayout:
        """Layout of the workers that compute prompts; see `KVFormat.computed`."""
        return replace(self, format=self.format.computed)

    @property
    def handed_off(self) -> BlockLayout:
        """Layout of the blocks as they reach a decode worker; see `KVFormat.handed_off`."""
        return replace(self, format=self.format.handed_off)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_layers * self.format.layer_bytes(self.block_size)

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """`[num_blocks, num_layers, num_planes, num_kv_heads, head_bytes]` bytes; of two planes K, then V."""
        return (num_blocks, self.num_layers, *self.format.layer_shape(self.block_size))

    def describe(self) -> str:
        """One line for logs and error messages."""
        return (
            f"{self.num_layers} layers x {self.format.describe()}, {self.block_size} tokens a block, "
            f"{self.block_bytes} bytes a block"
            + ("" if self.groups.is_plain else f", windows of {len(self.windows)} groups {self.windows}")
            + (f", the last {self.num_states} of states" if self.num_states else "")
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
        converted = self.format.handed_off.name, other.format.handed_off.name
        if (self.format.is_converted or other.format.is_converted) and converted[0] != converted[1]:
            of_pair = ("dtype", "source", "sent")  # said by the names of what reaches a decode worker
            differing = [item for item in differing if item[0] not in of_pair] + [("dtype", *converted)]
        if differing:
            parts = [f"{name} {here} here, {there} there" for name, here, there in differing]
            raise ModelMismatch(
                f"block layouts differ: {'; '.join(parts)}", field=",".join(name for name, _, _ in differing)
            )
