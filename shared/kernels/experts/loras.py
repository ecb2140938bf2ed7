"""Low-rank additions to a layer's experts: those of one adapter, and those of a step's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.reference import add_lora, make_plain_lora
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import ExpertLoras, ExpertParts, Lora


@dataclass(frozen=True, eq=False)
class StepExpertLoras:
    """What adapters add to one layer's experts in a step."""

    adapters: Sequence[ExpertLoras | None]
    """By addition, of one `Experts.make_loras` each; None: it leaves this layer's experts alone."""
    rows: LoraRows
    """Which tokens have which addition."""


def make_plain_loras(
    parts: Mapping[int, ExpertParts], num_experts: int, hidden_size: int, expert_size: int, like: Tensor
) -> ExpertLoras:
    """`Experts.make_loras` of experts that add by `add_expert_loras`."""

    def of(found: Sequence[LoraPart], in_size: int) -> Lora | None:
        return make_plain_lora(found, in_size, like) if found else None

    none = ExpertParts()
    each = [parts.get(expert, none) for expert in range(num_experts)]
    return ExpertLoras(
        tuple(of(found.gate_up, hidden_size) for found in each),
        tuple(of(found.down, expert_size) for found in each),
    )


def add_expert_loras(
    out: Tensor, x: Tensor, loras: StepExpertLoras | None, expert: int, tokens: Tensor, *, is_down: bool
) -> Tensor:
    """Adds to what one projection of an expert gave for rows `x`, in place.

    Args:
        out: [num_rows, out_size], contiguous.
        x: [num_rows, in_size].
        loras: None where no token of the step has an addition.
        expert: number among those that are here.
        tokens: [num_rows] int64, the rows' tokens.
        is_down: whether it is the second projection.

    Returns:
        `out`.
    """
    if loras is None:
        return out
    found = [None if one is None else (one.down if is_down else one.gate_up)[expert] for one in loras.adapters]
    if any(lora is not None for lora in found):
        of_rows = [loras.rows.additions[token] for token in tokens.tolist()]
        add_lora(out, x.contiguous(), found, LoraRows.of(of_rows, len(found), x.device))
    return out
