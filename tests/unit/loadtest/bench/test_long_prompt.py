"""Gaps are counted where they ended, and pairs are compared within themselves."""

from __future__ import annotations

import pytest

from loadtest.bench.long_prompt.measure import SYSTEMS, median_of, results
from loadtest.bench.long_prompt.running_answers import Pair, gaps_within
from loadtest.records import Reply


def reply(*times_s: float) -> Reply:
    made = Reply()
    for at_s in times_s:
        made.add_tokens(at_s, [1])
    return made


def test_a_gap_belongs_to_the_window_that_holds_both_its_ends():
    gaps = gaps_within(1.0, 2.0, [reply(0.9, 1.0, 1.25, 2.5), reply(1.5, 2.0, 2.1), reply()])
    assert gaps == [0.25, 0.5]


def test_a_pair_is_a_ratio_of_its_own_windows():
    pair = Pair.of([0.01] * 98 + [0.02] * 2, [0.01] * 98 + [0.03] * 2, [0.5, 0.7])
    assert pair.p99_ratio == pytest.approx(1.5)
    assert pair.p50_ratio == pytest.approx(1.0)
    assert (pair.num_prompts, pair.prompt_ttft_ms) == (2, pytest.approx(600.0))


def pairs(*ratios: float) -> list[Pair]:
    return [Pair(5.0, 10.0 * (turn + 1), 6.0, 10.0 * (turn + 1) * ratio, 3, 400.0) for turn, ratio in enumerate(ratios)]


def test_the_median_is_of_the_pairs_ratios():
    assert median_of(pairs(1.0, 3.0, 1.1), "p99_ratio") == pytest.approx(1.1)


def test_the_figures_set_disaggregated_beside_the_best_collocated():
    measured = {"1P+1D": pairs(1.05), "auto": pairs(2.0), "2-collocated": pairs(4.0), "1-collocated": pairs(6.3)}
    found = {result.name: result for result in results(SYSTEMS, measured)}
    ratio = found["1P+1D: ITL p99 with over without"]
    assert ratio.limit == 1.1
    assert (ratio.peer, ratio.ratio) == ("2-collocated", pytest.approx(4.0 / 1.05))
