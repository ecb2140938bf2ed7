"""Which copy of an expert computes a token that chose it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.cpu.torch_threads import in_this_thread
from shared.model.layers.expert_placement import holders


@dataclass(frozen=True, eq=False)
class ExpertCopies:
    """A layer's experts where they do not lie in adjacent ranges, as one set of ranks sees them.

    A slot is a place for a copy: of expert e they are e * most_copies, e * most_copies + 1, … The copy that computes a
    choice follows from the token's row in the step and the expert: what every rank knows, and no two answer with yes.
    """

    most_copies: int
    num_copies: Tensor  # [num_experts] int64
    places: Tensor  # [num_experts * most_copies] int64: number among the set's own experts, -1 of other sets' copies

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]], own: int, device: torch.device | str = "cpu") -> ExpertCopies:
        """For the set of number `own`."""
        held = holders(sets)
        most = max(len(numbers) for numbers in held)
        places = torch.full((len(held), most), -1, dtype=torch.int64, device="cpu")
        for place, expert in enumerate(sets[own]):
            places[expert, held[expert].index(own)] = place
        num_copies = torch.tensor([len(numbers) for numbers in held], device=device)
        return cls(most, num_copies, places.flatten().to(device))

    def slots(self, expert_ids: Tensor) -> Tensor:
        """[num_tokens, top_k] int64, ids to slots."""
        with in_this_thread(expert_ids, expert_ids.numel()):
            turns = torch.arange(expert_ids.shape[0], device=expert_ids.device).unsqueeze(1) + expert_ids
            return expert_ids * self.most_copies + turns % self.num_copies[expert_ids]

    def local_ids(self, slots: Tensor) -> Tensor:
        """[num_tokens, top_k] int64: numbers among the set's own experts, -1 of what other sets compute."""
        with in_this_thread(slots, slots.numel()):
            return self.places[slots]


def slot_owners(sets: Sequence[Sequence[int]]) -> Tensor:
    """[num_experts, most copies of one] int64: number of the set behind each slot, 0 where there is no copy."""
    held = holders(sets)
    most = max(len(numbers) for numbers in held)
    return torch.tensor([[*numbers, *[0] * (most - len(numbers))] for numbers in held], device="cpu")
