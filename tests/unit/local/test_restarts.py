"""When a part is started again and when it is given up."""

from __future__ import annotations

import pytest

from services.local.supervisor import FIRST_DELAY_S, JITTER, WINDOW_S, Restarts


def test_three_deaths_in_a_minute_are_the_end() -> None:
    restarts = Restarts(lambda: 0.0)
    assert restarts.on_death(0.0) == FIRST_DELAY_S
    assert restarts.on_death(10.0) == 2 * FIRST_DELAY_S
    assert restarts.on_death(WINDOW_S - 0.1) is None


def test_deaths_that_lie_apart_cost_the_first_pause_each_time() -> None:
    restarts = Restarts(lambda: 0.0)
    assert [restarts.on_death(number * WINDOW_S) for number in range(10)] == [FIRST_DELAY_S] * 10


@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999])
def test_parts_that_die_together_do_not_start_together(drawn: float) -> None:
    assert Restarts(lambda: drawn).on_death(0.0) == FIRST_DELAY_S * (1 + JITTER * drawn)
