"""Work beside steps stops after each turn while other threads are busy, and takes what it likes while they are not."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace

import pytest

from shared.kernels.cpu import beside_steps
from shared.kernels.cpu.beside_steps import pause, work_beside_steps

MS = 1e-3


class Clocks:
    """Of a machine of two cores, on which others take `others` of a core."""

    def __init__(self, others: float) -> None:
        self.others = others
        self.now = self.own = self.theirs = 0.0
        self.slept: list[float] = []

    def work(self, seconds: float) -> None:
        self.own += seconds
        self._pass(seconds)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.theirs += seconds * self.others

    def as_time(self) -> SimpleNamespace:
        return SimpleNamespace(
            thread_time=lambda: self.own,
            process_time=lambda: self.own + self.theirs,
            perf_counter=lambda: self.now,
            sleep=self.sleep,
        )


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clocks, Callable[[], None]], None]:
    """Runs a function in a thread that works beside steps, by these clocks."""
    monkeypatch.setattr(beside_steps.os, "sched_getaffinity", lambda _: {0, 1})

    def run(clocks: Clocks, work: Callable[[], None]) -> None:
        monkeypatch.setattr(beside_steps, "time", clocks.as_time())

        def marked() -> None:
            work_beside_steps()
            work()

        thread = Thread(target=marked)
        thread.start()
        thread.join()

    return run


def pieces(clocks: Clocks, count: int, seconds: float) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            clocks.work(seconds)
            pause()

    return work


@pytest.mark.parametrize("piece_s", [0.1 * MS, 0.4 * MS, 1 * MS, 2 * MS])
def test_beside_busy_threads_it_takes_its_share_of_a_core_in_short_turns(beside, piece_s) -> None:
    clocks = Clocks(others=1.9)
    beside(clocks, pieces(clocks, 400, piece_s))
    assert clocks.own / clocks.now == pytest.approx(beside_steps._SHARE, rel=0.05)
    most = max(piece_s, beside_steps._TURN_S + piece_s)
    assert max(clocks.slept) <= most * (1 / beside_steps._SHARE - 1) * (1 + 1e-9)


@pytest.mark.parametrize("others", [0.0, 0.05])
@pytest.mark.parametrize("piece_s", [0.4 * MS, 3 * MS, 10 * MS, 100 * MS])
def test_beside_idle_threads_it_stops_for_a_moment_alone(beside, others, piece_s) -> None:
    clocks = Clocks(others)
    beside(clocks, pieces(clocks, 400, piece_s))
    assert len(clocks.slept) <= 1


def test_a_step_from_which_others_take_cores_is_not_disturbed_the_more(beside) -> None:
    clocks = Clocks(others=0.4)
    beside(clocks, pieces(clocks, 400, 0.4 * MS))
    assert clocks.own / clocks.now == pytest.approx(beside_steps._SHARE, rel=0.05)


@pytest.mark.parametrize(("away_s", "theirs_s"), [(0.05, 0.0), (60.0, 1.0), (60.0, 14.0)])
def test_one_that_has_been_idle_looks_anew(beside, away_s, theirs_s) -> None:
    """Others have begun since, whatever they took of all that time."""
    clocks = Clocks(others=0.0)

    def work() -> None:
        pieces(clocks, 100, 0.4 * MS)()
        clocks._pass(away_s)
        clocks.theirs += theirs_s
        clocks.others = 1.9
        clocks.slept.clear()
        pieces(clocks, 3, 0.4 * MS)()

    beside(clocks, work)
    assert clocks.slept


def test_no_sleep_is_long(beside) -> None:
    clocks = Clocks(others=1.9)
    beside(clocks, pieces(clocks, 2, 5.0))
    assert clocks.slept == [beside_steps._LONGEST_SLEEP_S] * 2


def test_other_threads_are_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(others=1.9)
    monkeypatch.setattr(beside_steps, "time", clocks.as_time())
    pieces(clocks, 10, 5.0)()
    assert not clocks.slept
