"""What agents find again: the oracle is a bound, and retention comes near it where all fits."""

from __future__ import annotations

import pytest

from loadtest.bench.prefix.agents import BLOCK_SIZE, LAST_TOKENS, RETAIN_S, Arrival, arrivals, oracle_hits, pool_hits

LARGEST = LAST_TOKENS // BLOCK_SIZE


@pytest.mark.parametrize("share", [0.6, 1.5])
def test_retention_lies_between_last_use_and_the_oracle(share: float) -> None:
    prompts = arrivals(3, 1.0)
    size = round(share * 3 * LARGEST)
    plain, retained = (pool_hits(prompts, size, 3, retain_s) for retain_s in (0.0, RETAIN_S))
    assert plain < retained <= oracle_hits(prompts, size)
    if share > 1:
        assert retained > 0.95


def test_the_oracle_cuts_what_comes_back_last() -> None:
    prompts = [Arrival(float(at), name, 4, known) for at, name, known in ((0, 1, 0), (1, 2, 0), (2, 1, 4), (3, 2, 4))]
    assert oracle_hits(prompts, 8) == 1
    assert oracle_hits(prompts, 6) == (4 + 2) / 8
    assert oracle_hits(prompts, 4) == 4 / 8
