"""The CPU backend's linear layers: their kinds, by what suits weight and processor, and how weights are packed.

The C++ `linear` reads weights in panels of 32 outputs, bf16 ones losslessly compressed to 12 bits a weight. A decode
step of few sequences takes as long as reading the weights: a quarter fewer bytes take a quarter less time.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.linear import PlainLinear

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16
"""fp32 numbers in a vector: sizes must be multiples of it."""
PANEL = 32
"""Outputs of a projection that lie side by side once its weight is packed."""
MOST_RARE = 1 / 128
"""Share of a panel's weights that may lie outside its table: each of these is added on its own after the panel."""

_HEAD_BYTES, _COLUMN_BYTES, _RARE_BYTES, _LINE_BYTES = 64, PANEL * 3 // 2, 8, 64  # of source/panels.h
WIDE_CHUNK = 512
"""Rows of a bf16 weight that are widened to fp32 at a time, to stay in the cache."""
Library = Callable[[], ctypes.CDLL]
"""Called for each product: benchmarks put a timed library in the place of the other."""


def scratch_floats(num_rows: int, in_size: int) -> int:
    """Numbers of a product's scratch memory: its rows laid out, and their sums by groups of codes."""
    return num_rows * (in_size + in_size // LANES)


def is_bf16(tensor: Tensor) -> int:
    """1 for bf16, 0 for fp32, as the C++ kernels take it; asserts that it is one of them."""
    _assert_dtype(tensor)
    return int(tensor.dtype == torch.bfloat16)


def fits_panels(weight: Tensor) -> bool:
    """Whether a weight [out_size, in_size], fp32 or bf16, can be laid out in panels: its sizes fit vectors."""
    _assert_dtype(weight)
    out_size, size = weight.shape
    return out_size % PANEL == 0 and size % LANES == 0 and weight.is_contiguous()


def pack_panels(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    """Lays a weight [out_size, in_size] out in panels [out_size / 32, in_size, 32], in its own memory."""
    out_size, size = weight.shape
    library.tandem_pack_linear(weight.data_ptr(), size, out_size, is_bf16(weight))
    return weight.view(out_size // PANEL, size, PANEL)


def compress_panels(library: ctypes.CDLL, panels: Tensor) -> Tensor | None:
    """Plain bf16 panels [num_panels, in_size, 32] in 12 bits a weight: uint8 [num_panels, bytes of a panel].

    None where too many weights do not have one of a panel's 15 exponents.
    """
    num_panels, size, _ = panels.shape
    out_size = num_panels * PANEL
    tables = torch.empty((num_panels, 16), dtype=torch.uint8)
    num_rare = torch.empty(num_panels, dtype=torch.int64)
    library.tandem_plan_compression(panels.data_ptr(), size, out_size, tables.data_ptr(), num_rare.data_ptr())
    most = int(num_rare.max())
    if most > MOST_RARE * PANEL * size:
        return None
    num_lines = -(-(_HEAD_BYTES + _COLUMN_BYTES * size + _RARE_BYTES * most) // _LINE_BYTES)
    compressed = torch.empty((num_panels, num_lines * _LINE_BYTES), dtype=torch.uint8)
    stride = compressed.shape[1]
    library.tandem_compress(panels.data_ptr(), size, out_size, tables.data_ptr(), stride, compressed.data_ptr())
    return compressed


def _assert_dtype(tensor: Tensor) -> None:
    assert tensor.dtype in DTYPES, f"{tensor.dtype} is neither fp32 nor bf16"


class PackedLinear(ABC):
    """See `Linear`: a weight in panels of 32 outputs, multiplied by the C++ kernels; every sum is taken in fp32."""

    def __init__(self, library: Library, panels: Tensor, bias: Tensor | None, in_size: int, dtype: torch.dtype) -> None:
        """`panels`, [out_size / 32, …], as the kind lays them out, keeps the memory that the kernels read."""
        self.library = library
        self.panels = panels
        self.bias = bias
        self.in_size = in_size
        self.out_size = panels.shape[0] * PANEL
        self.dtype = dtype
        self._is_bf16 = int(dtype == torch.bfloat16)

    @property
    @abstractmethod
    def panel_stride(self) -> int:
        """Bytes from one compressed panel to the next; 0 where the panels are not compressed."""

    @property
    def form(self) -> int:
        """The form of codes in the panels, as source/codes.h has it; 0 where they are numbers."""
        return 0

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.panels.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        num_rows, size = x.shape
        assert x.dtype == self.dtype, f"{x.dtype} times {self.dtype}"
        assert size == self.in_size, f"{size} columns times panels of {self.in_size}"
        assert x.is_contiguous(), "x is strided"
        out = torch.empty((num_rows, self.out_size), dtype=x.dtype)
        if num_rows == 0:
            return out
        scratch = torch.empty(scratch_floats(num_rows, size), dtype=torch.float32)
        self.library().tandem_linear(
            x.data_ptr(),
            self.panels.data_ptr(),
            self.panel_stride,
            self.form,
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            num_rows,
            size,
            self.out_size,
            self._is_bf16,
        )
        return out


class PanelLinear(PackedLinear):
    """Panels [out_size / 32, in_size, 32] of the weight's own dtype."""

    @property
    def panel_stride(self) -> int:
        """See `PackedLinear`."""
        return 0

    @classmethod
    def pack(cls, library: Library, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Packs a weight in its own memory; its sizes satisfy `fits_panels`."""
        return cls(library, pack_panels(library(), weight), bias, weight.shape[1], weight.dtype)


class CompressedLinear(PackedLinear):
    """Panels of a bf16 weight, losslessly compressed to 12 bits a number: uint8 [out_size / 32, bytes of a panel]."""

    @property
    def panel_stride(self) -> int:
        """See `PackedLinear`."""
        return self.panels.shape[1]

    @classmethod
    def pack(cls, plain: PanelLinear) -> CompressedLinear | None:
        """Compresses plain panels of bf16; None where the weight has too many different exponents."""
        library = plain.library
        panels = compress_panels(library(), plain.panels)
        return None if panels is None else cls(library, panels, plain.bias, plain.in_size, plain.dtype)


class PaddedLinear:
    """See `Linear`: a weight whose sizes do not fit panels, padded with zeros to the next sizes that do."""

    def __init__(self, padded: PackedLinear, in_size: int, out_size: int) -> None:
        """`padded`: the weight padded to at least `out_size` and `in_size`."""
        self.padded = padded
        self.in_size = in_size
        self.out_size = out_size

    @classmethod
    def pack(cls, library: Library, weight: Tensor, bias: Tensor | None) -> PaddedLinear:
        """A copy of the weight [out_size, in_size], laid out in panels."""
        out_size, in_size = weight.shape
        more = -out_size % PANEL
        wide = functional.pad(weight, (0, -in_size % LANES, 0, more))
        return cls(pack(library, wide, None if bias is None else functional.pad(bias, (0, more))), in_size, out_size)

    @property
    def dtype(self) -> torch.dtype:
        """See `Linear`."""
        return self.padded.dtype

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.padded.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        assert x.shape[1] == self.in_size, f"{x.shape[1]} columns times {self.in_size}"
        wide = functional.pad(x, (0, self.padded.in_size - self.in_size)).contiguous()
        return self.padded.forward(wide)[:, : self.out_size].contiguous()


class WideLinear(PlainLinear):
    """A bf16 weight on a processor without bf16 arithmetic: multiplied in fp32, a cache-sized chunk at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        wide_x = x.float()
        out = torch.empty((x.shape[0], self.out_size), dtype=torch.float32)
        chunk = torch.empty((min(WIDE_CHUNK, self.out_size), self.in_size), dtype=torch.float32)
        for start in range(0, self.out_size, WIDE_CHUNK):
            rows = self.weight[start : start + WIDE_CHUNK]
            wide = chunk[: rows.shape[0]].copy_(rows)
            torch.mm(wide_x, wide.t(), out=out[:, start : start + rows.shape[0]])
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)


def pack(library: Library, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """A weight whose sizes satisfy `fits_panels`, compressed where its exponents allow that.

    The weight's memory is overwritten, and freed where only the caller's tensor refers to it.
    """
    plain = PanelLinear.pack(library, weight, bias)
    if not is_bf16(weight):
        return plain
    compressed = CompressedLinear.pack(plain)
    if compressed is None:
        return plain
    if weight.untyped_storage().nbytes() == weight.nbytes:  # not part of another tensor's memory
        weight.untyped_storage().resize_(0)
    return compressed
