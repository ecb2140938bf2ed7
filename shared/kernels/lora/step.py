"""The low-rank additions of one step: packed weights, and the rows that they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.rows import LoraRows

Projection = Literal["qkv", "o", "gate_up", "down"]
"""Linear layers of a decoder's layer."""
PROJECTIONS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")
"""Projections in the order in which a token passes them."""


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


@dataclass(frozen=True)
class ExpertParts:
    """The additions of one adapter to one expert, in the order of outputs."""

    gate_up: tuple[LoraPart, ...] = ()
    down: tuple[LoraPart, ...] = ()


@dataclass(frozen=True, eq=False)
class ExpertLoras:
    """The additions of one adapter to a layer's experts, laid out by these. Their creator is the only reader."""

    gate_up: tuple[Lora | None, ...]  # [num_local_experts]
    down: tuple[Lora | None, ...]

    @property
    def nbytes(self) -> int:
        """Memory of their weights."""
        return sum(lora.nbytes for lora in (*self.gate_up, *self.down) if lora is not None)


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter as a backend computes with it."""

    loras: tuple[Lora | None, ...]  # [num_layers * 4], of each layer the projections in the order of PROJECTIONS
    experts: Mapping[int, ExpertLoras] = field(default_factory=dict)  # by layer, of those whose experts it adds to
    number: int = 0  # by which the ranks of a group know their parts of one adapter; 0 in one process

    @classmethod
    def of(
        cls,
        layers: Sequence[Mapping[Projection, Sequence[LoraPart]]],
        in_sizes: Sequence[Mapping[Projection, int]],
        ops: LoraOps,
        like: Tensor,
        experts: Mapping[int, ExpertLoras],
    ) -> PackedAdapter:
        """`layers`: of each, the parts by projection; `in_sizes`: likewise; `like` as for `make_lora`; `experts` by
        layer."""
        return cls(
            tuple(
                ops.make_lora(layer[name], sizes[name], like) if layer.get(name) else None
                for layer, sizes in zip(layers, in_sizes, strict=True)
                for name in PROJECTIONS
            ),
            experts,
        )

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        of_experts = sum(loras.nbytes for loras in self.experts.values())
        return of_experts + sum(lora.nbytes for lora in self.loras if lora is not None)


@dataclass(frozen=True, eq=False)
class HostCopy:
    """An adapter in the host's memory, from which it can be laid out again without its folder."""

    num_bytes: int
    """Bytes that it takes, in a group on all ranks together."""
    lay_out: Callable[[], PackedAdapter]
    """Blocking; from any thread but the engine's. Raises RankLost where a rank of the group is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter that was read and laid out for the kernels."""

    digest: str
    rank: int
    packed: PackedAdapter
    num_bytes: int
    """Bytes that it takes, in a group on all ranks together."""
    copy: HostCopy | None = None
    """Copy in host memory; None where none is kept."""


@dataclass(frozen=True, eq=False)
class StepExpertLoras:
    """What adapters add to one layer's experts in a step."""

    adapters: Sequence[ExpertLoras | None]
    """By addition, of one `Experts.make_loras` each; None: it leaves this layer's experts alone."""
    rows: LoraRows
    """Which tokens have which addition."""


class Loras(Protocol):
    """What a decoder computes beside its projections in one step."""

    def add(self, out: Tensor, x: Tensor, layer: int, projection: Projection) -> None:
        """To what a projection gave, in place; arguments as for `LoraOps.add_lora`."""
        ...

    def experts(self, layer: int) -> StepExpertLoras | None:
        """To a layer's experts; None where no adapter adds to them."""
        ...

    def of_kept(self) -> Loras:
        """The adapters of the rows that the last layer computes: the wanted ones."""
        ...


class LoraSlots(Protocol):
    """Adapters in slots from 1 on, for decode steps that a graph holds: nothing here moves once it is made."""

    def place(self, slot: int, adapter: PackedAdapter | None) -> bool:
        """Fills or empties a slot; whether `step` computes with what is there now: not for additions to experts. Its
        weights stay the caller's to keep."""
        ...

    def fill(self, slots: Sequence[int], size: int, empty: Callable[[int], Tensor]) -> None:
        """Queues which slot each row of the next step of `size` rows has, 0 for none; rows behind `slots` have none.
        `empty`: makes memory on the host to copy from, of the given number of bytes, uint8."""
        ...

    def step(self, size: int) -> Loras:
        """What is added to steps of `size` rows, whatever `fill` says."""
        ...


@runtime_checkable
class HoldsLoras(Protocol):
    """An addition to a backend whose steps graphs hold."""

    def hold_loras(self, num_layers: int, num_slots: int, most_rows: int, max_rank: int, like: Tensor) -> LoraSlots:
        """Empty slots.

        Args:
            num_layers: of the decoder.
            num_slots: beside slot 0.
            most_rows: of a step.
            max_rank: the highest of an adapter's part.
            like: on the model's device.
        """
        ...


@dataclass(frozen=True, eq=False)
class StepLoras:
    """See `Loras`: of a step whose rows are sorted for it."""

    adapters: tuple[PackedAdapter, ...]
    """Each of the step's adapters once; a row's addition is its place here."""
    rows: LoraRows
    """Rows of all tokens."""
    kept: LoraRows
    """Rows of the tokens whose logits are wanted, numbered among these."""
    ops: LoraOps

    def add(self, out: Tensor, x: Tensor, layer: int, projection: Projection) -> None:
        """See `Loras`."""
        if not self.rows.num_rows:
            return
        place = layer * len(PROJECTIONS) + PROJECTIONS.index(projection)
        loras = [adapter.loras[place] for adapter in self.adapters]
        if any(lora is not None for lora in loras):
            self.ops.add_lora(out, x, loras, self.rows)

    def experts(self, layer: int) -> StepExpertLoras | None:
        """See `Loras`."""
        found = [adapter.experts.get(layer) for adapter in self.adapters]
        if not self.rows.num_rows or all(loras is None for loras in found):
            return None
        return StepExpertLoras(found, self.rows)

    def of_kept(self) -> StepLoras:
        """See `Loras`."""
        return StepLoras(self.adapters, self.kept, self.kept, self.ops)
