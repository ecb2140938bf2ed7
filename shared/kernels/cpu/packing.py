"""Weights as the C++ `linear` reads them: panels of 32 outputs, bf16 ones losslessly compressed to 12 bits a weight.

A decode step of few sequences takes as long as reading the weights: a quarter fewer bytes take a quarter less time.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16
"""fp32 numbers in a vector: sizes must be multiples of it."""
PANEL = 32
"""Outputs of a projection that lie side by side once its weight is packed."""
MOST_RARE = 1 / 128
"""Share of a panel's weights that may lie outside its table: each of these is added on its own after the panel."""

_HEAD_BYTES, _COLUMN_BYTES, _RARE_BYTES, _LINE_BYTES = 64, PANEL * 3 // 2, 8, 64  # of source/panels.h


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
