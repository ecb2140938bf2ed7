"""Torch's sampling of all rows at once against the rules in fp64, one row at a time."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.sampling.philox import uniform as engine_uniform
from shared.kernels.sampling.reference import sample_tokens, uniform, uniform_on_device
from shared.kernels.sampling.rows import SamplingRows

from .sampling_case import SamplingCase, broken_rows, is_drawn_within_rounding


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 8),
    vocab_size=st.sampled_from([1, 2, 10, 300]),
    seed=st.integers(0, 10_000),
    ties=st.booleans(),
)
def test_every_row_gives_the_token_at_its_point(num_rows: int, vocab_size: int, seed: int, ties: bool) -> None:
    case = SamplingCase(num_rows, vocab_size, seed, ties)
    for row, token in enumerate(sample_tokens(case.logits, case.rows).tolist()):
        if case.temperatures[row] == 0:
            assert token == int(case.logits[row].argmax())
        else:
            assert is_drawn_within_rounding(case.logits[row], case.rows, row, token)


def test_rows_without_a_choice_give_minus_one() -> None:
    logits, rows, tokens = broken_rows()
    assert sample_tokens(logits, rows).tolist() == tokens


def test_random_numbers_equal_the_engines() -> None:
    choose = random.Random(1)
    pairs = [(choose.getrandbits(64), choose.getrandbits(40)) for _ in range(200)] + [(2**64 - 1, 0)]
    rows = SamplingRows.from_lists([1.0] * 201, [0] * 201, [1.0] * 201, [0.0] * 201, *zip(*pairs, strict=True))
    assert uniform(rows.seeds, rows.positions).tolist() == [engine_uniform(*pair) for pair in pairs]
    assert uniform_on_device(rows.seeds, rows.positions).tolist() == [engine_uniform(*pair) for pair in pairs]


def test_the_reference_never_waits_for_its_device() -> None:
    """On a device a copy to the host would break a graph's capture; the meta device has no values to copy."""
    case = SamplingCase(3, 10, 0)
    rows = SamplingRows(*(tensor.to("meta") for tensor in vars(case.rows).values()))
    assert sample_tokens(case.logits.to("meta"), rows).shape == (3,)
