"""Pairs for the one tensor that transformers 5 has of all experts of a layer, as PEFT trains `target_parameters`.

Such a pair is named by the experts alone, or by a wrapper around them, whichever was wrapped last: its shapes say
whether it adds to gate and up or to down. Its ranks are those of the experts behind each other in `a`, and by turns in
`b`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from shared.errors import ModelLoadError
from shared.model.config.model_config import ModelConfig

_MODULE = re.compile(r"model\.layers\.(\d{1,6})\.mlp\.experts(?:\.base_layer){0,3}")
PARAMETERS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One pair, whose shapes fit."""

    layer: int
    parameter: Literal["gate_up_proj", "down_proj"]

    @property
    def name(self) -> str:
        """Name of what it adds to, for patterns of ranks and alphas."""
        return f"model.layers.{self.layer}.mlp.experts.{self.parameter}"

    def pairs(self, config: ModelConfig, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """For each projection of each expert its module's name, a [rank, in_size] and b [num_outputs, rank], of
        a [num_experts * rank, in_size] and b [outputs, rank * num_experts]."""
        assert config.moe is not None
        gate, up, down = config.moe.projections
        count, size = config.moe.routing.num_experts, config.moe.expert_size
        of_a, of_b = a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count)
        for expert in range(count):
            prefix = f"model.layers.{self.layer}.{config.moe.prefix}.experts.{expert}."
            rows = of_b[:, :, expert]
            parts = {gate: rows[:size], up: rows[size:]} if self.parameter == "gate_up_proj" else {down: rows}
            for name, own in parts.items():
                yield prefix + name, of_a[expert], own.contiguous()


def is_expert_stack(module: str) -> bool:
    """Whether a pair's name is that of all experts of a layer."""
    return _MODULE.fullmatch(module) is not None


def expert_stack(module: str, a: tuple[int, ...], b: tuple[int, ...], config: ModelConfig) -> tuple[ExpertStack, int]:
    """What a pair of these shapes adds to, and its rank for each expert. Raises ModelLoadError."""
    found = _MODULE.fullmatch(module)
    assert found is not None
    layer, moe = int(found[1]), config.moe
    if moe is None or moe.stacked is not None or layer >= config.num_layers or not config.has_experts(layer):
        raise ModelLoadError(
            f"{module} is named as all experts of a layer, which {config.architecture} does not have there, or not in "
            "a form that adapters are added to",
            tensor=module,
        )
    count, hidden, inner = moe.routing.num_experts, config.hidden_size, moe.expert_size
    sizes: Mapping[tuple[int, int], Literal["gate_up_proj", "down_proj"]] = {
        (hidden, 2 * inner): "gate_up_proj",
        (inner, hidden): "down_proj",
    }
    if len(a) == len(b) == 2 and a[0] == b[1] and a[0] and a[0] % count == 0 and (a[1], b[0]) in sizes:
        return ExpertStack(layer, sizes[a[1], b[0]]), a[0] // count
    raise ModelLoadError(
        f"{module} has shapes {list(a)} and {list(b)}, which fit neither gate_up_proj nor down_proj of {count} experts",
        tensor=module,
    )
