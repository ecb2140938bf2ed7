"""The low-rank additions of one step: packed weights, and the rows that they are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.rows import LoraRows

Projection = Literal["qkv", "o", "gate_up", "down"]
"""Linear layers of a decoder's layer."""
PROJECTIONS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")
"""In the order in which a token passes them."""


class Lora(Protocol):
    """All additions of one adapter to one projection, as a backend lays them out. Its creator is the only reader."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights as they lie."""
        ...


class LoraOps(Protocol):
    """What a backend computes for adapters. Every sum is taken in fp32, in an order that a row's batch mates do not
    change where the backend is deterministic."""

    def make_lora(self, parts: Sequence[LoraPart], in_size: int, like: Tensor) -> Lora:
        """Lays out the additions to one projection.

        Args:
            parts: in the order of their outputs, which do not overlap; their tensors are copied.
            in_size: columns of x.
            like: of the model's dtype, on its device.
        """
        ...

    def add_lora(self, out: Tensor, x: Tensor, loras: Sequence[Lora | None], rows: LoraRows) -> None:
        """Adds `scale * (x a^T) b^T` to the rows of `out` that have an addition, in place.

        Args:
            out: [num_tokens, out_size], contiguous, what the projection gave.
            x: [num_tokens, in_size], contiguous, of out's dtype, which the weights have too.
            loras: by addition, made by this backend; None: it leaves this projection alone.
            rows: which rows have which addition.
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter as a backend computes with it."""

    loras: tuple[Lora | None, ...]  # [num_layers * 4], of each layer the projections in the order of PROJECTIONS
    number: int = 0  # by which the ranks of a group know their parts of one adapter; 0 in one process

    @classmethod
    def of(
        cls,
        layers: Sequence[Mapping[Projection, Sequence[LoraPart]]],
        in_sizes: Mapping[Projection, int],
        ops: LoraOps,
        like: Tensor,
    ) -> PackedAdapter:
        """`layers`: of each, the parts by projection; `in_sizes` by projection; `like` as for `make_lora`."""
        return cls(
            tuple(
                ops.make_lora(layer[name], in_sizes[name], like) if layer.get(name) else None
                for layer in layers
                for name in PROJECTIONS
            )
        )

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return sum(lora.nbytes for lora in self.loras if lora is not None)


@dataclass(frozen=True, eq=False)
class StepLoras:
    """What a decoder computes beside its projections in one step."""

    adapters: tuple[PackedAdapter, ...]
    """Each of the step's adapters once; a row's addition is its place here."""
    rows: LoraRows
    """Of all tokens."""
    kept: LoraRows
    """Of the tokens whose logits are wanted, numbered among these."""
    ops: LoraOps

    def add(self, out: Tensor, x: Tensor, layer: int, projection: Projection) -> None:
        """To what a projection gave, in place; arguments as for `add_lora`."""
        if not self.rows.num_rows:
            return
        place = layer * len(PROJECTIONS) + PROJECTIONS.index(projection)
        loras = [adapter.loras[place] for adapter in self.adapters]
        if any(lora is not None for lora in loras):
            self.ops.add_lora(out, x, loras, self.rows)

    def of_kept(self) -> StepLoras:
        """The same where only the wanted rows are computed any more."""
        return StepLoras(self.adapters, self.kept, self.kept, self.ops)
