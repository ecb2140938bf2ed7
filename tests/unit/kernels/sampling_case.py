"""Random logits and ways to choose from them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from shared.kernels.sampling.philox import time_of, token_word
from shared.kernels.sampling.rows import SamplingRows


class SamplingCase:
    """Rows of one vocabulary size; `ties` makes many logits equal, as a head computed in bf16 does."""

    def __init__(self, num_rows: int, vocab_size: int, seed: int, ties: bool = False, device: str = "cpu") -> None:
        generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
        logits = torch.randn(num_rows, vocab_size, generator=generator) * choose.choice([0.5, 2.0, 5.0])
        self.logits = (logits.bfloat16().float() if ties else logits).to(device)
        self.temperatures = [choose.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(num_rows)]
        self.top_ks = [choose.choice([0, 0, 1, 5, 50, vocab_size + 3]) for _ in range(num_rows)]
        self.top_ps = [choose.choice([1.0, 1.0, 0.95, 0.5, 0.01]) for _ in range(num_rows)]
        self.min_ps = [choose.choice([0.0, 0.0, 0.05, 0.3, 1.0]) for _ in range(num_rows)]
        self.seeds = [choose.getrandbits(64) for _ in range(num_rows)]
        self.positions = [choose.randrange(1 << 17) for _ in range(num_rows)]
        self.rows = SamplingRows.from_lists(
            self.temperatures, self.top_ks, self.top_ps, self.min_ps, self.seeds, self.positions, device
        )


def broken_rows(device: str = "cpu") -> tuple[Tensor, SamplingRows, list[int]]:
    """Logits that no token can be chosen from, beside two rows that have one: (logits, rows, tokens)."""
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = float("nan")
    logits[1, 4] = float("inf")
    logits[2] = float("-inf")
    logits[3, :49] = float("-inf")
    logits[5, 7] = float("nan")
    logits[6, 20:] = float("-inf")
    temperatures = [1.0, 1.0, 0.7, 1.0, 1e-40, 0.0, 0.0]
    rows = SamplingRows.from_lists(temperatures, [0] * 7, [1.0] * 7, [0.0] * 7, [1] * 7, [2] * 7, device)
    likeliest = int(logits[6].argmax())
    return logits.to(device), rows, [-1, -1, -1, 49, -1, -1, likeliest]


def wins_within_rounding(logits: Tensor, rows: SamplingRows, row: int, token: int, slack: float = 1e-6) -> bool:
    """Whether `token` wins a row's race, or is so near to that that rounding decides.

    Computed in fp64 from logits [vocab_size] of which no two are nearly equal. The bounds that top-p and min-p set may
    be off by `slack` of the mass, and speeds by ten times that.
    """
    temperature, top_p, min_p = (float(x[row]) for x in (rows.temperatures, rows.top_ps, rows.min_ps))
    quotients = (logits / rows.temperatures[row]).double()
    weights, order = (quotients - quotients.max()).exp().sort(descending=True, stable=True)
    if temperature == 0 or token < 0:
        return False
    seed, position = int(rows.seeds[row]) % (1 << 64), int(rows.positions[row])
    times = torch.tensor([time_of(token_word(seed, position, each)) for each in order.tolist()], dtype=torch.float64)
    speeds = weights / times
    place = int((order == token).nonzero())
    ends = weights.cumsum(0)
    for p in (top_p, top_p * (1 - slack), min(top_p * (1 + slack), 1.0)):
        for least in (min_p, min_p * (1 - slack), min(min_p * (1 + slack), 1.0)):
            kept = int((weights >= least).sum())
            kept = min(kept, int(rows.top_ks[row]) or kept)
            if p < 1:
                kept = max(int((ends[:kept] - weights[:kept] < p * ends[kept - 1]).sum()), 1)
            if place < kept and speeds[place] >= (1 - 10 * slack) * speeds[:kept].max():
                return True
    return False
