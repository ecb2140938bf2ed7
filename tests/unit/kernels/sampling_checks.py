"""Sampling and masks of any backend against the torch reference or the plain formula, on any device.

Only functions that are called in the right process import triton.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from shared.kernels.sampling.history import Penalties, TokenHistory
from shared.kernels.sampling.reference import race_times
from shared.kernels.sampling.rows import SamplingRows
from shared.kernels.torch_backend import TorchKernels

from .comparing import triton_kernels
from .sampling_case import SamplingCase, broken_rows, wins_within_rounding


def check_times(device: str = "cpu") -> None:
    """The kernel's times of tokens, to the bit, for seeds and positions of any size."""
    from .probes import store_times

    choose = random.Random(0)
    keys = [(choose.getrandbits(64), choose.getrandbits(40)) for _ in range(6)]
    keys += [(0, 0), (2**64 - 1, 2**40), (2**63, 1), (2**32, 2**32)]
    seeds = torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed, _ in keys])
    positions = torch.tensor([position for _, position in keys])
    tokens = torch.tensor([0, 15, 16, 63, 64, 99, 1023])
    expected = race_times(seeds, positions, 1024)[:, tokens].flatten()
    triples = torch.stack(
        [seeds.repeat_interleave(len(tokens)), positions.repeat_interleave(len(tokens)), tokens.repeat(len(keys))], 1
    ).contiguous()
    times = torch.empty(len(triples), device=device)
    store_times[(len(triples),)](triples.to(device), times, enable_fp_fusion=False)
    assert times.cpu().equal(expected)


def check_sampling(num_rows: int, vocab_size: int, seed: int, *, ties: bool, device: str = "cpu") -> None:
    """Token for token what the reference chooses from the same probabilities."""
    case = SamplingCase(num_rows, vocab_size, seed, ties, device)
    tokens = triton_kernels().sample_tokens(case.logits, case.rows)
    assert tokens.tolist() == TorchKernels().sample_tokens(case.logits, case.rows).tolist()


def check_split_sampling(
    num_rows: int, vocab_size: int, seed: int, *, ties: bool, capacity: int, refine_over: int, device: str = "cpu"
) -> None:
    """Rows of many splits; a small `refine_over` narrows most ranges, a small `capacity` overflows with some."""
    from shared.kernels.sampling.launch import SamplingSizes, sample_tokens

    case = SamplingCase(num_rows, vocab_size, seed, ties, device)
    sizes = SamplingSizes(split=64, refine_over=refine_over, capacity=capacity, tile=128)
    tokens = sample_tokens(case.logits, case.rows, sizes)
    assert tokens.tolist() == TorchKernels().sample_tokens(case.logits, case.rows).tolist()


def check_flat_sampling(vocab_size: int, spread: float, sizes: dict[str, int], device: str = "cpu") -> None:
    """Rows so flat that thousands of tokens can be drawn, by temperature alone and cut by top-p or by top-k alone."""
    from shared.kernels.sampling.launch import SamplingSizes, sample_tokens

    cuts = [(0, 1.0), (0, 0.95), (0, 0.3), (vocab_size // 20, 1.0), (vocab_size // 20, 0.9)]
    num_rows = len(cuts)
    numbers = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1))
    logits = (numbers * spread).bfloat16().float().to(device)  # many equal, no two nearly so
    top_ks, top_ps = zip(*cuts, strict=True)
    rows = SamplingRows.from_lists(
        [1.0] * num_rows, top_ks, top_ps, [0.0] * num_rows, range(num_rows), range(num_rows), device
    )  # fmt: skip
    found = sample_tokens(logits, rows, SamplingSizes(**sizes)).tolist()
    for row, expected in enumerate(TorchKernels().sample_tokens(logits, rows).tolist()):
        is_near = found[row] == expected or wins_within_rounding(logits[row], rows, row, found[row])
        assert is_near, f"row {row}: {found[row]}, not {expected}"


def check_broken_logits(kernels: Any = None, device: str = "cpu") -> None:
    logits, rows, tokens = broken_rows(device)
    assert (kernels or triton_kernels()).sample_tokens(logits, rows).tolist() == tokens


def check_banned_tokens_are_never_drawn(kernels: Any = None, device: str = "cpu") -> None:
    """A row of -inf but for a few tokens, many draws."""
    allowed = [3, 17, 40]
    logits = torch.full((12, 50), float("-inf"), device=device)
    logits[:, allowed] = 0.0
    rows = SamplingRows.from_lists(
        [1.0] * 12, [0] * 12, [1.0] * 12, [0.0] * 12, list(range(12)), list(range(12)), device
    )
    assert set((kernels or triton_kernels()).sample_tokens(logits, rows).tolist()) == set(allowed)


def check_masks(num_rows: int, vocab_size: int, num_masks: int, seed: int, kernels: Any, device: str = "cpu") -> None:
    """Bit for bit what the bits of the masks say, over rows in any order; words of all, of none and of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_words = -(-vocab_size // 32) + seed % 2
    masks = torch.randint(-(2**31), 2**31, (num_masks, num_words), generator=generator, dtype=torch.int32)
    kinds = torch.randint(0, 3, (num_masks, num_words), generator=generator)
    masks = torch.where(kinds == 0, 0, torch.where(kinds == 1, -1, masks)).to(device)
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(device)
    logits[:, 0] = float("nan")
    rows = torch.randperm(num_rows, generator=generator)[:num_masks].to(device)
    expected = logits.clone()
    for mask, row in zip(masks.tolist(), rows.tolist(), strict=True):
        for token in range(vocab_size):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = float("-inf")
    kernels.mask_tokens(logits, masks, rows)
    assert torch.equal(logits.nan_to_num(7.0), expected.nan_to_num(7.0))


def check_triton_masks(num_rows: int, vocab_size: int, num_masks: int, seed: int, device: str = "cpu") -> None:
    check_masks(num_rows, vocab_size, num_masks, seed, triton_kernels(), device)


def check_likeliest(vocab_size: int, seed: int, kernels: Any, device: str = "cpu") -> None:
    """The first of the highest among the allowed tokens, in rows with and without masks, ties and broken numbers."""
    generator = torch.Generator().manual_seed(seed)
    num_words = -(-vocab_size // 32) + seed % 2
    logits = torch.randint(-3, 4, (12, vocab_size), generator=generator).float()  # many are equal
    logits = torch.where(logits == 0, torch.tensor([0.0, -0.0]).repeat(vocab_size)[:vocab_size], logits)
    logits[1:3] = torch.randn(2, vocab_size, generator=generator)
    logits[3, -1], logits[4, 0], logits[5, vocab_size // 2] = float("nan"), -float("nan"), float("inf")
    logits[6], logits[7, :-1] = float("-inf"), float("-inf")
    masks = torch.randint(-(2**31), 2**31, (9, num_words), generator=generator, dtype=torch.int32)
    kinds = torch.randint(0, 3, masks.shape, generator=generator)
    masks = torch.where(kinds == 0, 0, torch.where(kinds == 1, -1, masks))
    masks[0], masks[1] = 0, -1
    rows = torch.randperm(12, generator=generator)[:9]
    allowed_of: dict[int, list[int]] = dict(zip(rows.tolist(), masks.tolist(), strict=True))
    expected = [_likeliest(values, allowed_of.get(row)) for row, values in enumerate(logits.tolist())]
    before, logits = logits, logits.to(device)
    assert kernels.greedy_tokens(logits, masks.to(device), rows.to(device)).tolist() == expected
    assert logits.cpu().nan_to_num(9.5).equal(before.nan_to_num(9.5))
    unmasked = [_likeliest(values, None) for values in before.tolist()]
    assert kernels.greedy_tokens(logits).tolist() == unmasked
    assert kernels.greedy_tokens(logits, masks[:0].to(device), rows[:0].to(device)).tolist() == unmasked


def _likeliest(logits: list[float], words: list[int] | None) -> int:
    """Of one row, as `SamplingOps.greedy_tokens` says it."""
    allowed = [token for token in range(len(logits)) if words is None or words[token // 32] >> token % 32 & 1]
    found = max(allowed, key=lambda token: logits[token], default=-1)
    is_broken = any(math.isnan(value) or value == math.inf for value in logits)
    return -1 if is_broken or found < 0 or logits[found] == -math.inf else found


def check_triton_likeliest(vocab_size: int, seed: int, device: str = "cpu") -> None:
    check_likeliest(vocab_size, seed, triton_kernels(), device)


def check_penalties(num_rows: int, vocab_size: int, seed: int, kernels: Any, device: str = "cpu") -> None:
    """Tokens are counted one by one, and then penalised as the formula says, to the bit, over slots that held other
    sequences before; a row without a slot stays as it is."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    history = TokenHistory.empty(num_rows + 2, vocab_size, device)
    history.counts.random_(0, 99)  # of sequences that were there before
    slots = choose.sample(range(num_rows + 2), num_rows)
    slots[0] = -1
    outputs: list[list[int]] = [[] for _ in range(num_rows)]
    for _ in range(40):
        tokens = [choose.choice([-1, 0, 31, 32, vocab_size - 1, choose.randrange(vocab_size)]) for _ in outputs]
        rows = torch.tensor(slots, device=device), torch.tensor(tokens, device=device)
        kernels.count_tokens(history, *rows)
        for output, token in zip(outputs, tokens, strict=True):
            output += [token] if token >= 0 else []
    factors = [
        torch.tensor([choose.choice(some) for _ in outputs])
        for some in ([1.0, 1.3, 0.7], [0.0, 0.5, -1.1], [0.0, 0.3, -0.7])
    ]
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits[:, 1] = float("nan")
    expected = logits.clone()
    for row in range(1, num_rows):
        repetition, presence, frequency = (part[row] for part in factors)
        for token in set(outputs[row]):
            value = expected[row, token]
            value = value / repetition if value > 0 else value * repetition
            expected[row, token] = value - (presence + frequency * outputs[row].count(token))
    logits = logits.to(device)
    penalties = Penalties(torch.tensor(slots, device=device), *(part.to(device) for part in factors))
    kernels.penalize(logits, history, penalties)
    assert torch.equal(logits.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


def check_triton_penalties(num_rows: int, vocab_size: int, seed: int, device: str = "cpu") -> None:
    check_penalties(num_rows, vocab_size, seed, triton_kernels(), device)
