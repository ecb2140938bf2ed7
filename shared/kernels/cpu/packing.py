"""Weights as the C++ `linear` reads them: panels of 32 outputs, bf16 ones in 12 bits each, from which all 16 come back.

A decode step of few sequences takes as long as reading the weights does: a quarter less of them, a quarter less time.
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
"""Of a panel's weights, those that may lie outside its table: each is corrected by itself after the panel."""

_K_SIZE_AT = 16  # in a tight panel's head
_HEAD_BYTES, _COLUMN_BYTES, _RARE_BYTES, _LINE_BYTES = 64, PANEL * 3 // 2, 8, 64  # of source/panels.h


def pack(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    """Lays a weight [out_size, in_size], fp32 or bf16, out in panels; changes its memory.

    Returns panels [out_size / 32, in_size, 32] in place; or tight ones, uint8 [out_size / 32, bytes of a panel], and
    frees the weight's memory unless it is part of another tensor's; or the weight as it was where its sizes do not fit
    vectors.
    """
    packs_pairs = is_bf16(weight)
    out_size, size = weight.shape
    if out_size % PANEL or size % LANES or not weight.is_contiguous():
        return weight
    library.tandem_pack_linear(weight.data_ptr(), size, out_size, packs_pairs)
    tight = _tighten(library, weight) if packs_pairs and library.tandem_reads_tight() else None
    if tight is None:
        return weight.view(out_size // PANEL, size, PANEL)
    if weight.untyped_storage().nbytes() == weight.nbytes:  # its own, so nobody else's memory goes
        weight.untyped_storage().resize_(0)
    return tight


def _tighten(library: ctypes.CDLL, packed: Tensor) -> Tensor | None:
    """The packed bf16 weight in 12 bits each; None where too many of them do not have one of a panel's 15 exponents."""
    out_size, size = packed.shape
    panels = out_size // PANEL
    tables, num_rare = torch.empty((panels, 16), dtype=torch.uint8), torch.empty(panels, dtype=torch.int64)
    library.tandem_plan_tight(packed.data_ptr(), size, out_size, tables.data_ptr(), num_rare.data_ptr())
    most = int(num_rare.max())
    if most > MOST_RARE * PANEL * size:
        return None
    num_lines = -(-(_HEAD_BYTES + _COLUMN_BYTES * size + _RARE_BYTES * most) // _LINE_BYTES)
    tight = torch.empty((panels, num_lines * _LINE_BYTES), dtype=torch.uint8)
    library.tandem_tighten(packed.data_ptr(), size, out_size, tables.data_ptr(), tight.shape[1], tight.data_ptr())
    return tight


def is_bf16(tensor: Tensor) -> int:
    """1 for bf16, 0 for fp32, as the C++ kernels are told; asserts that it is one of them."""
    assert tensor.dtype in DTYPES, f"{tensor.dtype} is neither fp32 nor bf16"
    return int(tensor.dtype == torch.bfloat16)


def is_packed(weight: Tensor) -> bool:
    """Whether `pack` laid it out."""
    return weight.dim() == 3 or weight.dtype == torch.uint8


def in_size(weight: Tensor) -> int:
    """Of a packed weight."""
    if tight_bytes(weight):
        return ctypes.c_uint32.from_address(weight.data_ptr() + _K_SIZE_AT).value  # torch's own way takes 15 µs
    return weight.shape[1]


def check_packed(weight: Tensor, x: Tensor) -> None:
    """Asserts that x [num_rows, in_size] can be multiplied by a packed weight."""
    dtype = torch.bfloat16 if tight_bytes(weight) else weight.dtype
    assert x.dtype == dtype, f"{x.dtype} times {dtype}"
    assert x.shape[1] == in_size(weight), f"{x.shape[1]} columns times panels of {in_size(weight)}"


def tight_bytes(weight: Tensor) -> int:
    """From one tight panel to the next; 0 where they are not tight."""
    return weight.shape[1] if weight.dtype == torch.uint8 else 0
