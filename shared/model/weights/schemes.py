"""Readers of quantized weights, one a storage: by rows (compressed-tensors, fp8, Model Optimizer), AWQ, GPTQ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.kernels.linear_spec import Kind, LinearSpec
from shared.kernels.quantized import INT4_MIDDLE, Piece, powers_of_two, unpack_nibbles
from shared.model.config.quantization import MX_GROUP, STACKED_METHOD, QuantizationConfig, WeightScheme
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.gguf_source import gguf_source, stacked_source
from shared.model.weights.opened import Floats4Source, bits4_source, floats4_source, mxfp4_source
from shared.model.weights.safetensors_files import DENSE, TensorEntry
from shared.model.weights.sources import PIECE_ELEMENTS, Makers, check_entry, check_groups, check_scales, needed

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that has each of eight neighbours."""
_INT8_MIDDLE = 128


@dataclass(frozen=True)
class _Stored:
    """A weight [out_size, in_size] of which each subclass knows how codes, scales and zeros are stored."""

    module: str
    shape: tuple[int, int]
    scheme: WeightScheme
    names: tuple[str, ...]  # codes first
    offset: int = 0

    @property
    def name(self) -> str:
        """See `WeightSource`."""
        return self.names[0]

    @property
    def kind(self) -> Kind:
        """Kind of its codes."""
        return self.scheme.kind

    @property
    def spec(self) -> LinearSpec:
        """See `WeightSource`."""
        scheme = self.scheme
        groups = num_groups(scheme, self.shape[1]) if self._index_name else 0
        return LinearSpec(scheme.kind, scheme.group, self._zeros_name is not None, groups, scheme.rounds_input)

    @property
    def _index_name(self) -> str | None:
        name = f"{self.module}.{'weight_g_idx' if '.weight' in self.name else 'g_idx'}"
        return name if self.scheme.is_ordered and name in self.names else None

    @property
    def _zeros_name(self) -> str | None:
        zeros = (name for name in self.names if name.endswith(("zero_point", "qzeros")))
        return next(zeros, None) if self.scheme.has_zeros else None

    def _check_index(self, checkpoint: Checkpoint) -> None:
        name = next((name for name in self.names if name.endswith("g_idx")), None)
        if name is None:
            return
        index, groups = checkpoint.whole(name), num_groups(self.scheme, self.shape[1])
        if not self.scheme.is_ordered:
            adjacent = torch.arange(self.shape[1]) // (self.scheme.group or self.shape[1])
            if not index.equal(adjacent.to(index.dtype)):
                raise ModelLoadError(f"{name} orders columns, but config.json says that none are ordered", tensor=name)
        elif index.numel() and not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise ModelLoadError(
                f"{name} has groups from {index.min()} to {index.max()}, not 0 to {groups - 1}", tensor=name
            )

    def _index(self, checkpoint: Checkpoint) -> Tensor | None:
        return None if self._index_name is None else checkpoint.whole(self._index_name)


@dataclass(frozen=True)
class RowSource(_Stored):
    """Codes by rows, one an element or packed along a row, with a scale a row, group of columns, block or tensor."""

    scale_name: str = ""

    def check(self, checkpoint: Checkpoint) -> None:
        """See `WeightSource`."""
        check_scales(self.scale_name, self._scales(checkpoint))
        self._check_index(checkpoint)
        zeros_name = f"{self.module}.weight_zero_point"
        if zeros_name in self.names and not self.scheme.has_zeros and checkpoint.whole(zeros_name).any():
            raise ModelLoadError(f"{zeros_name} is not zero, but its scheme is symmetric", tensor=zeros_name)
        shape_name = f"{self.module}.weight_shape"
        if shape_name in self.names and tuple(checkpoint.whole(shape_name).tolist()) != self.shape:
            found = checkpoint.whole(shape_name).tolist()
            raise ModelLoadError(f"{shape_name} is {found}, expected {list(self.shape)}", tensor=shape_name)

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Piece]]:
        """See `WeightSource`."""
        scales, zeros, index = self._scales(checkpoint), self._zeros(checkpoint), self._index(checkpoint)
        for first, rows in checkpoint.rows(self.name, begin, end):
            codes = self._codes(rows)
            place = torch.arange(first, first + len(rows))
            if self.scheme.block_rows:
                own = scales[place // self.scheme.block_rows]
            else:
                own = scales.expand(self.shape[0], -1)[place]
            own_zeros = None if zeros is None else zeros.expand(self.shape[0], -1)[place]
            yield first, Piece(codes, own, own_zeros, self.scheme.group, index, self.kind)

    def _codes(self, rows: Tensor) -> Tensor:
        if rows.dtype == torch.int32:
            return _signed(_unpacked(rows, self.kind)[:, : self.shape[1]], self.kind)
        return (rows + INT4_MIDDLE).to(torch.uint8) if self.kind == "int4" else rows

    def _scales(self, checkpoint: Checkpoint) -> Tensor:
        stored = checkpoint.whole(self.scale_name)
        scales = powers_of_two(stored) if stored.dtype == torch.uint8 else stored.float()
        return scales if scales.dim() == 2 else scales.view(-1, 1)

    def _zeros(self, checkpoint: Checkpoint) -> Tensor | None:
        if self._zeros_name is None:
            return None
        zeros = checkpoint.whole(self._zeros_name)
        if zeros.dtype == torch.int32:
            codes = _unpacked(zeros.T.contiguous(), self.kind).T[: self.shape[0]]
            return _signed(codes, self.kind).to(torch.int16)
        zeros = zeros.to(torch.int16)
        zeros = zeros if zeros.dim() == 2 else zeros.view(-1, 1)
        return zeros + INT4_MIDDLE if self.kind == "int4" else zeros


@dataclass(frozen=True)
class ColumnSource(_Stored):
    """Codes by columns, as AWQ and GPTQ store them: scales [groups, out_size], zeros packed likewise."""

    is_awq: bool = False

    def check(self, checkpoint: Checkpoint) -> None:
        """See `WeightSource`."""
        check_scales(f"{self.module}.scales", checkpoint.whole(f"{self.module}.scales"))
        self._check_index(checkpoint)

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Piece]]:
        """See `WeightSource`."""
        words = checkpoint.whole(self.name)
        scales = checkpoint.whole(f"{self.module}.scales").float().T
        index, zeros = self._index(checkpoint), self._zeros(checkpoint)
        step = max(8, PIECE_ELEMENTS // self.shape[1] // 8 * 8)
        for first in range(begin, end, step):
            last = min(first + step, end)
            codes = _signed(self._codes(words, first, last), self.kind)
            yield first, Piece(codes, scales[first:last], zeros[first:last], self.scheme.group, index, self.kind)

    def _codes(self, words: Tensor, first: int, last: int) -> Tensor:
        """uint8 [rows, in_size]."""
        if not self.is_awq:
            return _unpacked(words[:, first:last].T.contiguous(), self.kind)
        low = first // 8
        codes = _unpacked_awq(words[:, low : -(-last // 8)].contiguous())
        return codes[:, first - 8 * low : last - 8 * low].T.contiguous()

    def _zeros(self, checkpoint: Checkpoint) -> Tensor:
        packed = checkpoint.whole(f"{self.module}.qzeros")
        stored = (_unpacked_awq(packed) if self.is_awq else _unpacked(packed, self.kind)).T[: self.shape[0]]
        most = 15 if self.kind == "int4" else 255
        zeros = (stored.to(torch.int16) + self.offset) & most  # a stored -1, of a zero of 0, has wrapped around
        return zeros - _INT8_MIDDLE if self.kind == "int8" else zeros


def _unpacked(words: Tensor, kind: Kind) -> Tensor:
    """int32 [rows, words] to uint8 [rows, codes], the lowest bits first."""
    # A dimension of size 1 may have any stride, which torch calls contiguous and does not view as bytes.
    as_bytes = words.flatten().view(torch.uint8).view(len(words), -1)
    return unpack_nibbles(as_bytes) if kind == "int4" else as_bytes


def _unpacked_awq(words: Tensor) -> Tensor:
    codes = unpack_nibbles(words.view(torch.uint8)).view(words.shape[0], -1, 8)
    return codes[..., list(_AWQ_ORDER)].flatten(1)


def _signed(codes: Tensor, kind: Kind) -> Tensor:
    """Codes of 8 bits are stored with an offset."""
    return (codes.to(torch.int16) - _INT8_MIDDLE).to(torch.int8) if kind == "int8" else codes


def num_groups(scheme: WeightScheme, in_size: int) -> int:
    """Scales of a row."""
    return -(-in_size // scheme.group) if scheme.group else 1


def _check_sizes(module: str, scheme: WeightScheme, in_size: int) -> None:
    if scheme.group and not scheme.block_rows:
        check_groups(module, in_size, scheme.group)
    if scheme.kind == "int4" and in_size % 2:
        raise ModelLoadError(
            f"{module}.weight has an odd number of 4-bit columns, {in_size}", tensor=f"{module}.weight"
        )


def row_source(
    module: str,
    shape: tuple[int, int],
    scheme: WeightScheme,
    _config: QuantizationConfig,
    entries: Mapping[str, TensorEntry],
) -> RowSource | Floats4Source:
    """The reader of compressed-tensors, of fp8, Model Optimizer's and Quark's checkpoints. Raises ModelLoadError."""
    if scheme.floats4:
        return floats4_source(module, shape, scheme, entries)
    out_size, in_size = shape
    _check_sizes(module, scheme, in_size)
    packed, plain = f"{module}.weight_packed", f"{module}.weight"
    names = [packed if packed in entries else plain]
    if packed in entries:
        per_word = 8 if scheme.kind == "int4" else 4
        check_entry(entries[packed], (out_size, -(-in_size // per_word)), ("I32",))
    else:
        codes = needed(entries, plain, "its scales are there")
        check_entry(codes, shape, ("F8_E4M3",) if scheme.kind == "fp8" else ("I8",))
    scale_name = next((name for name in (f"{plain}_scale", f"{plain}_scale_inv") if name in entries), f"{plain}_scale")
    scales = needed(entries, scale_name, f"{names[0]} has no scale")
    rows = -(-out_size // scheme.block_rows) if scheme.block_rows else out_size
    groups = num_groups(scheme, in_size)
    allowed: list[tuple[int, ...]] = [(rows, groups)]
    if groups == 1:
        allowed.append((rows,))
        allowed += [(), (1,), (1, 1)] if not scheme.block_rows else []
    kinds = (*DENSE, "U8") if (scheme.kind, scheme.group) == ("fp8", MX_GROUP) else DENSE  # U8: of MXFP8
    check_entry(scales, scales.shape if scales.shape in allowed else allowed[0], kinds)
    names.append(scale_name)
    if scheme.has_zeros:
        zeros = needed(entries, f"{plain}_zero_point", "the scheme is not symmetric")
        per_word = 8 if scheme.kind == "int4" else 4
        if zeros.dtype == "I32":
            check_entry(zeros, (-(-out_size // per_word), groups), ("I32",))
        else:
            check_entry(
                zeros, zeros.shape if prod(zeros.shape) in (1, out_size * groups) else (out_size, groups), ("I8", "U8")
            )
        names.append(zeros.name)
    if scheme.is_ordered:
        index = needed(entries, f"{plain}_g_idx", "columns are grouped by an index (actorder)")
        check_entry(index, (in_size,), ("I32", "I64"))
    further = (f"{plain}{end}" for end in ("_g_idx", "_shape", "_zero_point"))
    names += [name for name in further if name in entries and name not in names]
    return RowSource(module, shape, scheme, tuple(names), scale_name=scale_name)


def column_source(
    module: str,
    shape: tuple[int, int],
    scheme: WeightScheme,
    config: QuantizationConfig,
    entries: Mapping[str, TensorEntry],
) -> ColumnSource:
    """The reader of AWQ and GPTQ checkpoints. Raises ModelLoadError."""
    out_size, in_size = shape
    _check_sizes(module, scheme, in_size)
    is_awq = config.method == "awq"
    per_word, groups = 8 if scheme.kind == "int4" else 4, num_groups(scheme, in_size)
    codes = needed(entries, f"{module}.qweight", "its scales are there")
    scales = needed(entries, f"{module}.scales", f"{codes.name} has no scale")
    zeros = needed(entries, f"{module}.qzeros", f"{codes.name} has no zeros")
    words = (in_size, -(-out_size // 8)) if is_awq else (-(-in_size // per_word), out_size)
    check_entry(codes, words, ("I32",))
    check_entry(scales, (groups, out_size), DENSE)
    check_entry(zeros, (groups, -(-out_size // per_word)), ("I32",))
    names = [codes.name, scales.name, zeros.name]
    index = f"{module}.g_idx"
    if scheme.is_ordered:
        check_entry(needed(entries, index, "columns are grouped by an index (desc_act)"), (in_size,), ("I32", "I64"))
    if index in entries:
        names.append(index)
    return ColumnSource(module, shape, scheme, tuple(names), config.zeros_offset, is_awq=is_awq)


MAKERS = Makers(
    {
        "compressed-tensors": row_source,
        "fp8": row_source,
        "modelopt": row_source,
        "quark": row_source,
        "awq": column_source,
        "gptq": column_source,
        "bitsandbytes": bits4_source,
    },
    STACKED_METHOD,
    mxfp4_source,
    gguf_source,
    stacked_source,
)
