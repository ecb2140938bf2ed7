"""Low-rank additions by the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.cpu.beside_steps import pause
from shared.kernels.cpu.linear import LANES, is_bf16
from shared.kernels.lora.parts import MAX_RANK, MOST_PARTS, LoraPart
from shared.kernels.lora.reference import check_parts
from shared.kernels.lora.rows import LoraRows

CHUNK = 512
"""Inputs whose products are one sum, as in source/lora.h."""


class _Part(Structure):
    _fields_ = [
        ("b", c_void_p),
        *((name, c_int64) for name in ("begin", "outputs", "first_rank", "rank")),
        ("scale", c_double),
    ]


class _Lora(Structure):
    _fields_ = [("a", c_void_p), ("ranks", c_int64), ("num_parts", c_int64), ("parts", _Part * MOST_PARTS)]


class _Rows(Structure):
    _fields_ = [("order", c_void_p), ("tiles", c_void_p), ("num_tiles", c_int64), ("num_rows", c_int64)]


class CpuLora:
    """See `Lora`: `a` by vectors of ranks, `b` by vectors of outputs; ranks are padded to whole vectors."""

    def __init__(self, parts: Sequence[LoraPart], in_size: int, like: Tensor) -> None:
        """The sizes satisfy `fits_lora`."""
        check_parts(parts, in_size)
        wide = [_padded(part, like.dtype) for part in parts]
        self.ranks = sum(a.shape[0] for a, _ in wide)
        laid, bs = _laid([a for a, _ in wide]), [_laid([b]) for _, b in wide]
        self._owned = (laid, *bs)
        found, first = _Lora(laid.data_ptr(), self.ranks, len(parts)), 0
        for place, (part, (a, plain), b) in enumerate(zip(parts, wide, bs, strict=True)):
            found.parts[place] = _Part(b.data_ptr(), part.begin, plain.shape[0], first, a.shape[0], part.scale)
            first += a.shape[0]
        self._struct = found
        pause()

    @property
    def nbytes(self) -> int:
        """See `Lora`."""
        return sum(tensor.nbytes for tensor in self._owned)

    @property
    def address(self) -> int:
        """The address at which the C++ kernels read it."""
        return ctypes.addressof(self._struct)


def fits_lora(parts: Sequence[LoraPart], in_size: int) -> bool:
    """Whether the C++ kernels take these sizes, which must fit vectors."""
    return in_size % LANES == 0 and all(part.b.shape[0] % LANES == 0 and part.begin % LANES == 0 for part in parts)


def _padded(part: LoraPart, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a [rank, in_size], b [outputs, rank]) of a rank of whole vectors."""
    more = -part.a.shape[0] % LANES
    assert part.a.shape[0] <= MAX_RANK, f"rank {part.a.shape[0]}"
    a, b = part.a.to(dtype), part.b.to(dtype)
    return (functional.pad(a, (0, 0, 0, more)), functional.pad(b, (0, more))) if more else (a, b)


def _laid(matrices: Sequence[Tensor]) -> Tensor:
    """[rows, columns] each, one below the other, by vectors of rows, a column behind the other, of bf16 two:
    [rows / 16, columns / n, 16, n]."""
    words = [matrix.contiguous().view(torch.int32) for matrix in matrices]  # which torch transposes ten times as fast
    return torch.cat([each.view(-1, LANES, each.shape[1]).transpose(1, 2) for each in words]).view(matrices[0].dtype)


class CpuRows:
    """`LoraRows` as the C++ kernels read them."""

    def __init__(self, rows: LoraRows) -> None:
        self._order = rows.order
        self._tiles = np.array(rows.tiles(), dtype=np.int64)
        self._struct = _Rows(rows.order.data_ptr(), self._tiles.ctypes.data, len(self._tiles), rows.num_rows)

    @classmethod
    def of(cls, rows: LoraRows) -> CpuRows:
        """Made once for all layers."""
        return rows.remember("cpu", lambda: cls(rows))

    @property
    def address(self) -> int:
        """The address at which the C++ kernels read it."""
        return ctypes.addressof(self._struct)


def sum_floats(num_rows: int, in_size: int, most_ranks: int) -> int:
    """Numbers of the scratch memory of an addition."""
    return -(-in_size // CHUNK) * num_rows * most_ranks


def add_lora(library: ctypes.CDLL, out: Tensor, x: Tensor, loras: Sequence[CpuLora | None], rows: LoraRows) -> None:
    """See `LoraOps`; arguments are checked."""
    if not rows.num_rows:
        return
    most_ranks = max((lora.ranks for lora in loras if lora is not None), default=0)
    addresses = np.array([0 if lora is None else lora.address for lora in loras], dtype=np.uint64)
    sums = torch.empty(sum_floats(rows.num_rows, x.shape[1], most_ranks), dtype=torch.float32)
    sizes = (c_int64 * 3)(x.shape[1], out.shape[1], most_ranks)
    library.tandem_add_lora(
        x.data_ptr(),
        out.data_ptr(),
        sizes,
        addresses.ctypes.data,
        CpuRows.of(rows).address,
        sums.data_ptr(),
        is_bf16(x),
    )
