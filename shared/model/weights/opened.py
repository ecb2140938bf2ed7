"""Sources of weights that are opened to plain numbers as they are read: MXFP4's experts, MXFP4 and NVFP4 of linear
layers, and bitsandbytes' 4 bits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.kernels.quantized import FLOATS4, powers_of_two, unpack_nibbles
from shared.model.config.quantization import MX_GROUP, QuantizationConfig, WeightScheme
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.safetensors_files import DENSE, TensorEntry
from shared.model.weights.sources import PIECE_ELEMENTS, check_entry, check_groups, check_scales, needed

_STATE = "weight.quant_state.bitsandbytes__"
_STATE_BYTES = 1 << 16
_TYPES = ("nf4", "fp4")
_MULTIPLIED = "_scale_2"
"""End of the name of a whole weight's scale that is multiplied, not divided by: Model Optimizer's."""


@dataclass(frozen=True)
class Mxfp4Experts:
    """All experts' weights of a layer, inputs first: [num_experts, in_size, out_size].

    Stored are codes of four bits, blocks [num_experts, out_size, in_size / 32, 16], two codes a byte, the first in the
    lower half, and scales [num_experts, out_size, in_size / 32], powers of two.
    """

    blocks: str
    scales: str
    spec: None = None

    @property
    def name(self) -> str:
        """See `WeightSource`."""
        return self.blocks

    @property
    def names(self) -> tuple[str, ...]:
        """See `WeightSource`."""
        return self.blocks, self.scales

    def check(self, checkpoint: Checkpoint) -> None:
        """See `WeightSource`."""
        for _, scales in checkpoint.rows(self.scales, 0, checkpoint.entries[self.scales].shape[0]):
            check_scales(self.scales, powers_of_two(scales))

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """See `WeightSource`; an expert at a time."""
        for expert in range(begin, end):
            blocks = torch.cat([rows.clone() for _, rows in checkpoint.rows(self.blocks, expert, expert + 1)])[0]
            scales = torch.cat([rows.clone() for _, rows in checkpoint.rows(self.scales, expert, expert + 1)])[0]
            codes = unpack_nibbles(blocks)  # [out_size, groups, 32]
            yield expert, (FLOATS4[codes.int()] * powers_of_two(scales)[..., None]).flatten(1).T[None]


def mxfp4_source(name: str, shape: tuple[int, ...], entries: Mapping[str, TensorEntry]) -> Mxfp4Experts:
    """The reader of one of gpt-oss's stacked weights. Raises ModelLoadError."""
    experts, in_size, out_size = shape
    if in_size % MX_GROUP:
        raise ModelLoadError(
            f"{name} has {in_size} inputs, which blocks of {MX_GROUP} do not divide", tensor=name, limit=MX_GROUP
        )
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    groups = in_size // MX_GROUP
    check_entry(entries[blocks], (experts, out_size, groups, MX_GROUP // 2), ("U8",))
    check_entry(needed(entries, scales, f"{blocks} has no scales"), (experts, out_size, groups), ("U8",))
    return Mxfp4Experts(blocks, scales)


@dataclass(frozen=True)
class Floats4Source:
    """A weight [out_size, in_size] in floats of 4 bits: two codes a byte, the first in the lower half, and a scale for
    each group of a row's columns. In MXFP4 that is a power of two; in NVFP4 it is in fp8, and compressed-tensors
    divides all by one for the whole, by which Model Optimizer multiplies them."""

    shape: tuple[int, int]
    scheme: WeightScheme
    names: tuple[str, ...]  # codes, scales and that of the whole, where there is one
    spec: None = None

    @property
    def name(self) -> str:
        """See `WeightSource`."""
        return self.names[0]

    def check(self, checkpoint: Checkpoint) -> None:
        """See `WeightSource`."""
        if self.scheme.floats4 == "nvfp4":
            _check_finite(self.names[1], checkpoint.whole(self.names[1]).float())
            check_scales(self.names[2], checkpoint.whole(self.names[2]))
        else:
            check_scales(self.names[1], powers_of_two(checkpoint.whole(self.names[1])))

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """See `WeightSource`."""
        scales = self._scales(checkpoint)
        for first, rows in checkpoint.rows(self.name, begin, end):
            codes = unpack_nibbles(rows).view(len(rows), -1, self.scheme.group)
            yield first, (FLOATS4[codes.int()] * scales[first : first + len(rows), :, None]).flatten(1)

    def _scales(self, checkpoint: Checkpoint) -> Tensor:
        """[out_size, groups] fp32."""
        scales = checkpoint.whole(self.names[1])
        if self.scheme.floats4 == "mxfp4":
            return powers_of_two(scales)
        of_whole = checkpoint.whole(self.names[2]).float().view(())
        return scales.float() * of_whole if self.names[2].endswith(_MULTIPLIED) else scales.float() / of_whole


def floats4_source(
    module: str, shape: tuple[int, int], scheme: WeightScheme, entries: Mapping[str, TensorEntry]
) -> Floats4Source:
    """The reader of NVFP4 and MXFP4. Raises ModelLoadError."""
    out_size, in_size = shape
    weight = f"{module}.weight"
    packed = weight if weight in entries else f"{weight}_packed"
    of_all = (f"{weight}{_MULTIPLIED if packed == weight else '_global_scale'}",) if scheme.floats4 == "nvfp4" else ()
    scale = f"{weight}_scale"
    check_groups(module, in_size, scheme.group)
    check_entry(needed(entries, packed, "its scales are there"), (out_size, in_size // 2), ("U8",))
    kinds = ("F8_E4M3",) if scheme.floats4 == "nvfp4" else ("U8",)
    check_entry(needed(entries, scale, f"{packed} has no scales"), (out_size, in_size // scheme.group), kinds)
    for name in of_all:
        entry = needed(entries, name, f"{packed} has no scale for the whole")
        check_entry(entry, entry.shape if prod(entry.shape) == 1 else (1,), DENSE)
    return Floats4Source(shape, scheme, (packed, scale, *of_all))


@dataclass(frozen=True)
class Bits4Source:
    """A weight [out_size, in_size] as bitsandbytes stores NF4 and FP4.

    Codes lie row after row, two a byte, the first in the upper half; each stands for one of 16 numbers of a table,
    times the largest number of its block, which runs over rows. Those may be rounded to 8 bits themselves, with a table
    and scales of their own.
    """

    module: str
    shape: tuple[int, int]
    state: str
    names: tuple[str, ...]  # codes first
    spec: None = None

    @property
    def name(self) -> str:
        """See `WeightSource`."""
        return self.names[0]

    def check(self, checkpoint: Checkpoint) -> None:
        """See `WeightSource`."""
        self._peaks(checkpoint)
        self._table(checkpoint)

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """See `WeightSource`."""
        peaks, block = self._peaks(checkpoint)
        table = self._table(checkpoint)
        in_size = self.shape[1]
        packed = checkpoint.whole(self.name).flatten().view(torch.uint8)
        step = max(1, PIECE_ELEMENTS // in_size)
        for first in range(begin, end, step):
            last = min(first + step, end)
            own = packed[first * in_size // 2 : last * in_size // 2]
            codes = torch.stack((own >> 4, own & 15), dim=1).flatten()
            places = torch.arange(first * in_size, last * in_size) // block
            yield first, (table[codes.int()] * peaks[places]).view(-1, in_size)

    def _table(self, checkpoint: Checkpoint) -> Tensor:
        name = f"{self.module}.weight.quant_map"
        table = checkpoint.whole(name).float()
        if not bool(table.isfinite().all()):
            raise ModelLoadError(f"{name} has entries that are no number: the checkpoint is damaged", tensor=name)
        return table

    def _peaks(self, checkpoint: Checkpoint) -> tuple[Tensor, int]:
        """(the largest number of each block, fp32, numbers of a block). Raises ModelLoadError."""
        state = self._state(checkpoint)
        block = self._size(state, "blocksize", 1 << 20)
        weight = f"{self.module}.weight"
        count = -(-prod(self.shape) // block)
        peaks_name = f"{weight}.absmax"
        peaks = checkpoint.whole(peaks_name).flatten()
        if peaks.numel() != count:
            raise ModelLoadError(
                f"{peaks_name} has {peaks.numel()} numbers, not the {count} of blocks of {block}", tensor=peaks_name
            )
        if f"{weight}.nested_absmax" not in self.names:
            if peaks.dtype == torch.uint8:
                raise ModelLoadError(f"{weight}.nested_absmax is missing: {peaks_name} is rounded", tensor=peaks_name)
            _check_finite(peaks_name, peaks.float())
            return peaks.float(), block
        outer = self._size(state, "nested_blocksize", 1 << 20)
        offset = state.get("nested_offset", 0.0)
        if not isinstance(offset, int | float):
            raise self._fault("nested_offset", offset)
        nested_name = f"{weight}.nested_absmax"
        nested = checkpoint.whole(nested_name).float().flatten()
        if nested.numel() != -(-count // outer):
            raise ModelLoadError(
                f"{nested_name} has {nested.numel()} numbers, not the {-(-count // outer)} of blocks of {outer}",
                tensor=nested_name,
            )
        table = checkpoint.whole(f"{weight}.nested_quant_map").float()
        found = table[peaks.int()] * nested[torch.arange(count) // outer] + float(offset)
        _check_finite(nested_name, found)
        return found, block

    def _state(self, checkpoint: Checkpoint) -> dict[str, object]:
        try:
            state = json.loads(bytes(checkpoint.whole(self.state).flatten().tolist()))
        except ValueError as error:
            raise ModelLoadError(f"{self.state} is no JSON: {error}", tensor=self.state) from error
        if not isinstance(state, dict):
            raise ModelLoadError(f"{self.state} is no JSON object", tensor=self.state)
        if state.get("quant_type") not in _TYPES:
            raise self._fault("quant_type", state.get("quant_type"))
        if state.get("shape") != list(self.shape):
            raise self._fault("shape", state.get("shape"))
        return state

    def _size(self, state: Mapping[str, object], field: str, most: int) -> int:
        value = state.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._fault(field, value)
        return value

    def _fault(self, field: str, value: object) -> ModelLoadError:
        expected = {"quant_type": f"one of {', '.join(_TYPES)}", "shape": str(list(self.shape))}.get(field, "a size")
        return ModelLoadError(
            f"{self.state} has {field} {value!r}, expected {expected}", tensor=self.state, field=field
        )


def _check_finite(name: str, values: Tensor) -> None:
    """A block of zeros has 0, which no scale may be."""
    check_scales(name, torch.where(values == 0, 1.0, values))


def bits4_source(
    module: str,
    shape: tuple[int, int],
    _scheme: WeightScheme,
    _config: QuantizationConfig,
    entries: Mapping[str, TensorEntry],
) -> Bits4Source:
    """The reader of bitsandbytes' checkpoints in 4 bits. Raises ModelLoadError."""
    weight = f"{module}.weight"
    if shape[1] % 2:
        raise ModelLoadError(f"{weight} has an odd number of 4-bit columns, {shape[1]}", tensor=weight)
    codes = needed(entries, weight, "its quant_state is there")
    if codes.dtype in DENSE and codes.num_bytes * 2 == prod(shape):  # bnb_4bit_quant_storage: the same bytes
        check_entry(codes, (codes.shape[0], 1), DENSE)
    else:
        check_entry(codes, (prod(shape) // 2, 1), ("U8",))
    state = next((name for kind in _TYPES if (name := f"{module}.{_STATE}{kind}") in entries), None)
    if state is None:
        raise ModelLoadError(f"{module}.{_STATE}{_TYPES[0]} is missing from the checkpoint", tensor=weight, count=1)
    if entries[state].num_bytes > _STATE_BYTES:
        raise ModelLoadError(f"{state} has {entries[state].num_bytes} bytes", tensor=state, limit=_STATE_BYTES)
    check_entry(entries[state], None, ("U8",))
    peaks = needed(entries, f"{weight}.absmax", f"{weight} has no scales")
    check_entry(needed(entries, f"{weight}.quant_map", f"{weight} has no table"), (16,), DENSE)
    names = [weight, peaks.name, f"{weight}.quant_map", state]
    if f"{weight}.nested_absmax" in entries:
        check_entry(peaks, None, ("U8",))
        check_entry(entries[f"{weight}.nested_absmax"], None, DENSE)
        table = needed(entries, f"{weight}.nested_quant_map", f"{peaks.name} has no table")
        check_entry(table, (256,), DENSE)
        names += [f"{weight}.nested_absmax", table.name]
    else:
        check_entry(peaks, None, DENSE)
    return Bits4Source(module, shape, state, tuple(names))
