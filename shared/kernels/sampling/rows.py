"""How to choose a token in each row of a batch of logits, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """One entry a row. Off: temperature 1, top_k 0, top_p 1, min_p 0; temperature 0 is greedy."""

    temperatures: Tensor  # [num_rows] fp32, at least 0
    top_ks: Tensor  # [num_rows] int32, at least 0
    top_ps: Tensor  # [num_rows] fp64, in (0, 1]
    min_ps: Tensor  # [num_rows] fp32, in [0, 1]
    seeds: Tensor  # [num_rows] int64, the bits of an unsigned number
    positions: Tensor  # [num_rows] int64, index of the token to be chosen in its sequence

    def __post_init__(self) -> None:
        dtypes = (torch.float32, torch.int32, torch.float64, torch.float32, torch.int64, torch.int64)
        for tensor, dtype in zip(vars(self).values(), dtypes, strict=True):
            assert tensor.shape == (self.num_rows,)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()

    @property
    def num_rows(self) -> int:
        """Rows that a token is chosen for."""
        return self.temperatures.shape[0]

    @classmethod
    def from_lists(
        cls,
        temperatures: Sequence[float],
        top_ks: Sequence[int],
        top_ps: Sequence[float],
        min_ps: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """Build the tensors from host lists; seeds in [0, 2^64)."""
        signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
        return cls(
            torch.tensor(list(temperatures), dtype=torch.float32, device=device),
            torch.tensor(list(top_ks), dtype=torch.int32, device=device),
            torch.tensor(list(top_ps), dtype=torch.float64, device=device),
            torch.tensor(list(min_ps), dtype=torch.float32, device=device),
            torch.tensor(signed, dtype=torch.int64, device=device),
            torch.tensor(list(positions), dtype=torch.int64, device=device),
        )
