"""Weights in fewer bits: one form for all schemes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kernels.linear_spec import Kind, LinearSpec

INT4_MIDDLE = 8
"""The code of zero, where a 4-bit weight has no zeros of its own."""
FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
"""The largest number of float8_e4m3fn."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOATS4 = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
"""Floats of 4 bits by their codes, in fp32."""
_E8M0_BIAS, _E8M0_NAN = 127, 255
OPEN_ELEMENTS = 1 << 21
"""Weights that are rounded, or opened, at a time: 8 MiB in fp32."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [..., out_size, in_size]: `scale * (code - zero)`, or with lows `scale * code - low`.

    Scales and zeros are one a row and group of columns. Leading dimensions number weights of one size. Parts that were
    fused, `part_rows` each, may group columns each in an order of its own.
    """

    spec: LinearSpec
    in_size: int
    codes: Tensor
    """int8 or float8_e4m3fn [..., out_size, in_size]; of int4 uint8 [..., out_size, in_size / 2], two codes of 0 to 15
    a byte, the first in the lower half."""
    scales: Tensor  # fp32 [..., out_size, num_groups]
    zeros: Tensor | None
    """int16 [..., out_size, num_groups], or the lows in fp32; None: int8 and fp8 have 0, int4 INT4_MIDDLE."""
    part_rows: tuple[int, ...]
    index: Tensor | None = None  # int32 [..., num_parts, in_size], group of each column; None: group = column // size

    @classmethod
    def allocate(
        cls,
        spec: LinearSpec,
        shape: Sequence[int],
        device: torch.device | str,
        *,
        part_rows: Sequence[int] = (),
    ) -> QuantizedWeight:
        """Uninitialised; `part_rows`: of fused parts, none = one part."""
        *ahead, out_size, in_size = shape
        rows = tuple(part_rows) or (out_size,)
        assert sum(rows) == out_size, f"parts of {rows} rows in {out_size}"
        columns = in_size // 2 if spec.kind == "int4" else in_size
        codes_dtype = {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}[spec.kind]
        groups = spec.num_groups(in_size)

        def empty(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((*ahead, *size), dtype=dtype, device=device)

        return cls(
            spec,
            in_size,
            empty(out_size, columns, dtype=codes_dtype),
            empty(out_size, groups, dtype=torch.float32),
            empty(out_size, groups, dtype=torch.float32 if spec.has_lows else torch.int16) if spec.has_zeros else None,
            rows,
            empty(len(rows), in_size, dtype=torch.int32) if spec.index_groups else None,
        )

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight: [..., out_size, in_size]."""
        return torch.Size((*self.codes.shape[:-1], self.in_size))

    @property
    def out_size(self) -> int:
        """Number of rows."""
        return self.codes.shape[-2]

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales, zeros and index."""
        tensors = (self.codes, self.scales, self.zeros, self.index)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def by_row(self) -> list[Tensor]:
        """Views [..., out_size, …] of what rows have of their own: bytes of codes, scales and zeros."""
        tensors = (self.codes.view(torch.uint8), self.scales, self.zeros)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    def __getitem__(self, number: int) -> QuantizedWeight:
        """One of several weights, a view."""
        return replace(
            self,
            codes=self.codes[number],
            scales=self.scales[number],
            zeros=None if self.zeros is None else self.zeros[number],
            index=None if self.index is None else self.index[number],
        )

    def parts(self) -> list[QuantizedWeight]:
        """Views of the fused parts, one behind the other."""
        found, first = [], 0
        for number, count in enumerate(self.part_rows):
            index = None if self.index is None else self.index[..., number : number + 1, :]
            found.append(replace(self.rows(first, first + count), part_rows=(count,), index=index))
            first += count
        return found

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        """A view of some rows of one part, or of a weight without an index."""
        assert self.index is None or self.index.shape[-2] == 1 or len(self.part_rows) > 1
        return replace(
            self,
            codes=self.codes[..., begin:end, :],
            scales=self.scales[..., begin:end, :],
            zeros=None if self.zeros is None else self.zeros[..., begin:end, :],
            part_rows=(end - begin,),
        )

    def flattened(self) -> QuantizedWeight:
        """Several weights as one, their rows one behind the other; none has an index."""
        assert self.index is None
        zeros = None if self.zeros is None else self.zeros.flatten(0, 1)
        codes, scales = self.codes.flatten(0, 1), self.scales.flatten(0, 1)
        return replace(self, codes=codes, scales=scales, zeros=zeros, part_rows=(codes.shape[0],))

    def with_columns(self, order: Tensor) -> QuantizedWeight:
        """A copy of its codes with columns in this order, int64 [in_size], and without an index; this one is freed."""
        codes = unpack_nibbles(self.codes) if self.spec.kind == "int4" else self.codes
        codes = codes[..., order]
        self.codes.untyped_storage().resize_(0)
        made = pack_nibbles(codes) if self.spec.kind == "int4" else codes
        spec = replace(self.spec, index_groups=0)
        return replace(self, spec=spec, codes=made, index=None, part_rows=(self.out_size,))

    def free(self) -> None:
        """Gives the memory of codes, scales and zeros back; nothing reads them afterwards."""
        for tensor in (self.codes, self.scales, self.zeros):
            if tensor is not None and tensor.untyped_storage().nbytes() == tensor.nbytes:
                tensor.untyped_storage().resize_(0)

    def fill(self, first: int, piece: Piece) -> None:
        """Puts rows `first`, … of a weight that is not one of several."""
        last = first + piece.codes.shape[0]
        codes = pack_nibbles(piece.codes) if self.spec.kind == "int4" else piece.codes
        self.codes[first:last].copy_(codes)
        self.scales[first:last].copy_(piece.scales)
        if self.zeros is not None:
            self.zeros[first:last].copy_(zeros_of(self.spec.kind, piece))
        if self.index is not None:
            self.index.copy_(index_of(piece, self.in_size))

    def piece(self, begin: int, end: int) -> Piece:
        """Rows begin … end - 1 with a code an element, for a weight of one part."""
        codes = self.codes[begin:end]
        return Piece(
            unpack_nibbles(codes) if self.spec.kind == "int4" else codes,
            self.scales[begin:end],
            None if self.zeros is None else self.zeros[begin:end],
            self.spec.group,
            None if self.index is None else self.index[0],
            self.spec.kind,
            self.spec.has_lows,
        )

    def dense(self) -> Tensor:
        """[..., out_size, in_size] fp32."""
        if self.codes.dim() > 2:
            return torch.stack([self[number].dense() for number in range(self.codes.shape[0])])
        return torch.cat([part.piece(0, part.out_size).dense() for part in self.parts()])


@dataclass(frozen=True)
class Piece:
    """Some rows of a weight, as any scheme's reader gives them."""

    codes: Tensor  # [num_rows, num_columns] a code an element: int8, float8_e4m3fn, or of int4 uint8
    scales: Tensor  # [num_rows, num_groups]
    zeros: Tensor | None  # [num_rows, num_groups]
    group: int  # as in LinearSpec
    index: Tensor | None  # int [num_columns]
    kind: Kind
    has_lows: bool = False  # whether `zeros` are lows

    def columns(self, begin: int, end: int) -> Piece:
        """Some of the columns; where groups are of adjacent ones, they begin and end between two groups."""
        codes = self.codes[:, begin:end]
        if self.index is not None:
            return replace(self, codes=codes, index=self.index[begin:end])
        if not self.group:
            return replace(self, codes=codes)
        groups = slice(begin // self.group, -(-end // self.group))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(self, codes=codes, scales=self.scales[:, groups], zeros=zeros)

    def dense(self) -> Tensor:
        """[num_rows, num_columns] fp32."""
        codes, scales = self.codes.float(), self.scales.float()
        zeros = None if self.zeros is None else self.zeros.float()
        if self.kind == "int4" and zeros is None:
            codes = codes - INT4_MIDDLE
        num_rows, in_size = codes.shape
        if self.index is None and self.group and in_size % self.group == 0:  # a group lies together
            codes, scales = codes.view(num_rows, -1, self.group), scales[..., None]
            zeros = None if zeros is None else zeros[..., None]
        elif scales.shape[1] > 1:
            columns = index_of(self, in_size).long()
            scales = scales[:, columns]
            zeros = None if zeros is None else zeros[:, columns]
        if zeros is None:
            opened = codes * scales
        else:
            opened = codes * scales - zeros if self.has_lows else (codes - zeros) * scales
        return opened.view(num_rows, in_size)


Weight = Tensor | QuantizedWeight
"""A projection's weight [..., out_size, in_size], as checkpoints fill it and backends take it."""


def index_of(piece: Piece, in_size: int) -> Tensor:
    """int32 [in_size]: the group of each column, also where these are adjacent."""
    if piece.index is not None:
        return piece.index.to(torch.int32)
    columns = torch.arange(in_size, dtype=torch.int32, device=piece.codes.device)
    return columns // piece.group if piece.group else torch.zeros_like(columns)


def zeros_of(kind: Kind, piece: Piece) -> Tensor:
    """[num_rows, num_groups] int16, also where they are left out; lows as they are."""
    if piece.zeros is not None:
        return piece.zeros if piece.has_lows else piece.zeros.to(torch.int16)
    middle = INT4_MIDDLE if kind == "int4" else 0
    return torch.full(piece.scales.shape, middle, dtype=torch.int16, device=piece.codes.device)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., columns], each below 16, to [..., columns / 2]."""
    assert codes.shape[-1] % 2 == 0, f"{codes.shape[-1]} columns"
    return codes[..., ::2] | codes[..., 1::2] << 4


def powers_of_two(stored: Tensor) -> Tensor:
    """Scales of the type E8M0, uint8, in fp32; NaN where one is no number."""
    exponents = stored.int() - _E8M0_BIAS
    return torch.where(
        stored == _E8M0_NAN, torch.nan, torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    )


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes that `pack_nibbles` packed."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize_rows(
    weight: Tensor, spec: LinearSpec, scale_dtype: torch.dtype = torch.float32, shares: Tensor | None = None
) -> Piece:
    """Rounds rows [num_rows, in_size] of floats to the nearest codes.

    Scales follow from a group's largest number, or with zeros from its range, and are numbers of `scale_dtype`.
    `shares`: fp32 [num_rows, num_groups], how much of that the codes cover; None: all.
    """
    num_rows, in_size = weight.shape
    group = spec.group or in_size
    assert in_size % group == 0, f"{in_size} columns in groups of {group}"
    values = weight.float().view(num_rows, -1, group)
    if spec.has_zeros:
        assert spec.kind == "int4", f"zeros of {spec.kind}"
        low, high = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
        if shares is not None:
            low, high = low * shares, high * shares
        scales = _scales(high - low, 15.0, scale_dtype)
        if spec.has_lows:
            codes = ((values - low[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8)
            return Piece(codes.view(num_rows, in_size), scales, -low, spec.group, None, spec.kind, has_lows=True)
        zeros = (-low / scales).round().clamp(0, 15)
        codes = ((values / scales[..., None]).round() + zeros[..., None]).clamp(0, 15).to(torch.uint8)
        return Piece(codes.view(num_rows, in_size), scales, zeros, spec.group, None, spec.kind)
    most = {"int8": 127.0, "int4": 7.0, "fp8": FP8_MOST}[spec.kind]
    span = values.abs().amax(2) if shares is None else values.abs().amax(2) * shares
    scales = _scales(span, most, scale_dtype)
    scaled = values / scales[..., None]
    if spec.kind == "fp8":
        codes = scaled.clamp(-FP8_MOST, FP8_MOST).to(FP8)
    elif spec.kind == "int8":
        codes = scaled.round().clamp(-128, 127).to(torch.int8)
    else:
        codes = (scaled.round().clamp(-8, 7) + INT4_MIDDLE).to(torch.uint8)
    return Piece(codes.view(num_rows, in_size), scales, None, spec.group, None, spec.kind)


def rounded(weight: Tensor, spec: LinearSpec) -> QuantizedWeight:
    """A whole weight, rounded to a form without an index; some rows at a time."""
    found = QuantizedWeight.allocate(spec, weight.shape, weight.device)
    step = max(1, OPEN_ELEMENTS // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        found.fill(first, quantize_rows(weight[first : first + step], spec))
    return found


def _scales(span: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """A group of zeros alone has 1, since no scale may be 0."""
    scales = (span / most).to(dtype).float()
    return torch.where(scales > 0, scales, 1.0)
