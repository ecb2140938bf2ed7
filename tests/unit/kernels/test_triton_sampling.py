"""Triton's sampling, token for token, against the torch reference and the engine's sampler, interpreted."""

from __future__ import annotations

import random

import pytest

from shared.kernels.sampling.philox import uniform

from . import sampling_checks as checks
from .conftest import Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "seed"), [(8, 100, 0), (8, 100, 1), (6, 3000, 2), (4, 5000, 3), (3, 1, 4), (0, 9, 5)]
)
def test_tokens_equal_those_of_the_reference(
    interpreted: Run, num_rows: int, vocab_size: int, seed: int, ties: bool
) -> None:
    interpreted(checks.check_sampling, num_rows, vocab_size, seed, ties=ties)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_tokens_equal_those_of_the_reference(interpreted: Run, seed: int) -> None:
    for vocab_size, ties in ((300, False), (300, True), (2049, seed % 2 == 0)):
        interpreted(checks.check_sampling, 24, vocab_size, 100 + seed, ties=ties)
        interpreted(checks.check_split_sampling, 8, vocab_size, 200 + seed, ties=ties, capacity=32 << seed % 4)


def test_rows_without_a_choice_give_minus_one(interpreted: Run) -> None:
    interpreted(checks.check_broken_logits)


def test_banned_tokens_are_never_drawn(interpreted: Run) -> None:
    interpreted(checks.check_banned_tokens_are_never_drawn)


@pytest.mark.parametrize(("num_rows", "vocab_size", "num_masks"), [(4, 100, 3), (1, 1, 1), (2, 5000, 2), (3, 64, 0)])
def test_masks_leave_the_allowed_tokens(interpreted: Run, num_rows: int, vocab_size: int, num_masks: int) -> None:
    interpreted(checks.check_triton_masks, num_rows, vocab_size, num_masks, vocab_size)


@pytest.mark.parametrize(("vocab_size", "seed"), [(1, 0), (33, 1), (5000, 2)])
def test_the_likeliest_of_the_allowed_tokens(interpreted: Run, vocab_size: int, seed: int) -> None:
    interpreted(checks.check_triton_likeliest, vocab_size, seed)


def test_random_numbers_equal_the_engines(interpreted: Run) -> None:
    choose = random.Random(0)
    pairs = [(choose.getrandbits(64), choose.getrandbits(40)) for _ in range(20)]
    pairs += [(0, 0), (2**64 - 1, 2**40), (2**63, 1), (2**32, 2**32)]
    assert interpreted(checks.check_uniform, pairs) == [uniform(*pair) for pair in pairs]
