"""Length distributions and their notation."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.workloads.lengths import Fixed, LogNormal, Mix, Uniform, parse_lengths
from shared.errors import ConfigError


@pytest.mark.parametrize("text", ["512", "100-900", "512~0.6", "128@0.7+1024-2048@0.2+300~1@0.1"])
def test_draws_have_the_mean_that_the_distribution_says(text: str) -> None:
    lengths = parse_lengths(text, "input")
    rng = np.random.default_rng(0)
    drawn = [lengths.draw(rng) for _ in range(10_000)]
    assert np.mean(drawn) == pytest.approx(lengths.mean, rel=0.05)
    assert min(drawn) >= 1


def test_the_notation_becomes_the_distribution() -> None:
    assert parse_lengths("7", "x") == Fixed(7)
    assert parse_lengths("3-9", "x") == Uniform(3, 9)
    assert parse_lengths("64~.5", "x") == LogNormal(64.0, 0.5)
    assert parse_lengths("8@3+9@1", "x") == Mix((Fixed(8), Fixed(9)), (0.75, 0.25))


def test_uniform_reaches_both_ends() -> None:
    rng = np.random.default_rng(0)
    assert {Uniform(2, 4).draw(rng) for _ in range(200)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 512"),
        ("many", "expected 512"),
        ("0", "from 1 to"),
        ("9-3", "9 is above 3"),
        ("5~9", "sigma"),
        ("5+6@1", "needs a weight"),
        ("5@0+6@1", "needs a weight"),
        ("99999999999", "from 1 to"),
    ],
)
def test_what_cannot_be_read_names_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_lengths(text, "input")
    assert raised.value.field == "input"
