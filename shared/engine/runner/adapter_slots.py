"""The adapters that a runner computes with, by the slots that plans name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.plan import PlannedSequence
from shared.engine.runner.logprobs import logit_rows
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import LoraOps, PackedAdapter, StepLoras


class AdapterSlots:
    """Called by the engine thread alone. A step in flight keeps the adapters that it was launched with."""

    def __init__(self, ops: LoraOps, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._packed: dict[int, PackedAdapter] = {}

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Fills a slot, from 1 on, or empties it; no sequence that plans name uses it any more."""
        assert slot > 0, "slot 0 is the base model"
        if adapter is None:
            self._packed.pop(slot, None)
        else:
            self._packed[slot] = adapter

    def loras(self, items: Sequence[PlannedSequence]) -> StepLoras | None:
        """What adapters add in a step of these sequences; None where all are the base model's."""
        slots = sorted({item.adapter for item in items if item.adapter})
        if not slots:
            return None
        place = {slot: number for number, slot in enumerate(slots)} | {0: -1}
        of_rows = [place[item.adapter] for item in items for _ in item.token_ids]
        kept = [of_rows[row] for row in logit_rows(items)]
        return StepLoras(
            tuple(self._packed[slot] for slot in slots),
            LoraRows.of(of_rows, len(slots), self._device),
            LoraRows.of(kept, len(slots), self._device),
            self._ops,
        )
