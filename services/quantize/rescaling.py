"""Factors by which columns of a projection grow and what gives its input shrinks, so that rounding hurts less.

The product stays the same, `(w s) (x / s) = w x`, where the division is done where x comes from. Lin et al. 2023
("AWQ", arXiv:2306.00978) choose s by the size of activations, so that the columns that matter are rounded finely; Xiao
et al. 2022 ("SmoothQuant", arXiv:2211.10438) by the size of both, so that activations can be rounded too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.quantize.calibration import Inputs
from services.quantize.pairs import Pair, Rows
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.lora.step import Projection
from shared.kernels.quantized import quantize_rows

_EXPONENTS = tuple(step / 10 for step in range(11))
"""Exponents of the mean size of activations that are tried; 0: nothing is rescaled."""
_LEAST = 1e-4
"""Least mean size of an activation; smaller ones count as this."""


@dataclass
class Rescaling:
    """What a tensor is multiplied by before it is written, or what takes its place."""

    rows: Tensor | None = None  # fp32 [out_size]
    columns: Tensor | None = None  # fp32 [in_size]
    values: Tensor | None = None  # [size], of a norm: its new weight
    importance: Tensor | None = None  # fp32 [in_size], as for `quantize_narrowed`; None: ranges are not cut

    def apply(self, piece: Tensor, first: int) -> Tensor:
        """Rows `first`, … fp32, multiplied; a copy."""
        if self.values is not None:
            return self.values[first : first + len(piece)].float()
        if self.columns is not None:
            piece = piece * self.columns
        if self.rows is not None:
            piece = piece * self.rows[first : first + len(piece)].view(-1, *[1] * (piece.dim() - 1))
        return piece


@dataclass(frozen=True)
class _Reader:
    """A projection that is rounded."""

    weight: Tensor  # fp32 [out_size, in_size]
    spec: LinearSpec


def activation_aware(readers: Sequence[_Reader], inputs: Inputs, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """fp32 [in_size]: of the powers of the activations' mean size the one with the smallest error of the products."""
    sizes = pool(inputs.mean).clamp(min=_LEAST)
    best, least = torch.ones_like(sizes), float("inf")
    for exponent in _EXPONENTS:
        factors = sizes**exponent
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = sum(_error(reader, factors, inputs.rows) for reader in readers)
        if error < least:
            best, least = factors, error
    return best


def smoothing(readers: Sequence[_Reader], inputs: Inputs, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """fp32 [in_size]: what leaves activations and weights equally far from their largest numbers."""
    of_weights = pool(torch.stack([reader.weight.abs().amax(0) for reader in readers]).amax(0)).clamp(min=_LEAST)
    return (pool(inputs.largest).clamp(min=_LEAST) / of_weights).sqrt()


def _error(reader: _Reader, factors: Tensor, x: Tensor) -> float:
    rounded = quantize_rows(reader.weight * factors, reader.spec).dense() / factors
    return float(functional.linear(x, rounded - reader.weight).square().sum())


@dataclass(frozen=True)
class Model:
    """Tensors of a checkpoint, and how they are stored, as rescaling needs them."""

    weight: Callable[[str], Tensor]
    """A tensor in fp32, by its name."""
    has: Callable[[str], bool]
    specs: Mapping[str, LinearSpec]
    """Forms of the weights that are rounded, by name."""
    norm_offset: float
    norm_dtype: Callable[[str], torch.dtype]


Choose = Callable[[Sequence[_Reader], Inputs, Callable[[Tensor], Tensor]], Tensor]
"""From the readers of an input, that input, and what makes those factors alike that must be: fp32 [in_size]."""


def rescale(
    model: Model, pairs: Iterable[Pair], inputs: Mapping[Projection, Inputs], choose: Choose, *, cuts: bool
) -> dict[str, Rescaling]:
    """By the tensors' names, of a layer's pairs; a pair of which nothing is rounded stays as it is."""
    found: dict[str, Rescaling] = {}

    def of(name: str) -> Rescaling:
        return found.setdefault(name, Rescaling())

    for pair in pairs:
        weights = {name: model.weight(name) for module in pair.readers if (name := f"{module}.weight")}
        readers = [_Reader(weight, model.specs[name]) for name, weight in weights.items() if name in model.specs]
        if not readers:
            continue
        giver = pair.giver
        factors = choose(readers, inputs[pair.input], (lambda x: x) if isinstance(giver, str) else _shared(giver))
        if isinstance(giver, str):
            values, factors = _divided(model, giver, factors)
            of(giver).values = values
        else:
            rows = torch.ones(giver.out_size)
            rows[giver.first : giver.first + giver.count] = 1 / _of_rows(giver, factors)
            for name in (f"{giver.module}.weight", f"{giver.module}.bias"):
                if model.has(name):
                    of(name).rows = rows
        for name in weights:
            of(name).columns = factors
            if cuts:
                of(name).importance = inputs[pair.input].rows.square().mean(0) / factors.square()
    return found


def _divided(model: Model, name: str, factors: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's new weight as it can be stored, and the factors that this really divides by."""
    own = model.weight(name) + model.norm_offset
    values = (own / factors - model.norm_offset).to(model.norm_dtype(name))
    divided = values.float() + model.norm_offset
    return values, torch.where((divided == 0) | (own == 0), factors, own / divided)


def _by_run(giver: Rows, columns: Tensor) -> Tensor:
    """[in_size] to [runs, repeats, run]."""
    return columns.view(-1, giver.repeats, giver.run)


def _of_rows(giver: Rows, columns: Tensor) -> Tensor:
    """One number for each row, out of columns that all readers of a row share."""
    return _by_run(giver, columns)[:, 0].flatten() if giver.repeats > 1 else columns


def _shared(giver: Rows) -> Callable[[Tensor], Tensor]:
    """The largest of what the readers of a row have, for all of them."""

    def pool(columns: Tensor) -> Tensor:
        if giver.repeats == 1:
            return columns
        by_run = _by_run(giver, columns)
        return by_run.amax(1, keepdim=True).expand_as(by_run).flatten()

    return pool
