"""What the memory benchmark says of samples."""

from __future__ import annotations

import pytest

from loadtest.bench.memory import GOAL_GROWTH, Growth, Run, growth_table, results


def grown(first: int, last: int) -> Growth:
    return Growth(first - 10, [first] * 10 + [last * 2] + [last] * 10)


def test_growth_compares_medians_so_that_one_large_step_is_not_growth():
    growth = grown(1000, 1100)
    assert (growth.passed_bytes, growth.end_bytes, growth.most_bytes) == (1000, 1100, 2200)
    assert growth.share == pytest.approx(0.1)


def test_every_process_has_its_figures_and_workers_a_goal():
    run = Run(7, 3.0, {"prefill-0": grown(1000, 1100), "router": grown(500, 500)})
    found = {result.name: result for result in results("avx2", run)}
    assert found["avx2: prefill-0, growth"].value == pytest.approx(0.1)
    assert found["avx2: prefill-0, growth"].limit == GOAL_GROWTH
    assert found["avx2: router, growth"].limit is None
    assert found["avx2: router, memory at the end"].value == 500
    assert "+10.0%" in growth_table({"avx2": run})
