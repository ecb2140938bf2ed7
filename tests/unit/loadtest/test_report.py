"""The pages: true to their data, whatever a server says."""

from __future__ import annotations

import itertools

import pytest

from loadtest.rate_search import SearchSpace
from loadtest.records import FailureCause, RequestRecord, TtftSplit
from loadtest.report import render_run, render_sweeps
from loadtest.summary import summarize
from loadtest.sweep import Sweep
from tests.unit.loadtest.factories import answered, broken, result


def records() -> list[RequestRecord]:
    made = [
        answered(i, sent_s=i / 10, times_s=[i / 10 + 0.05, i / 10 + 0.3], counts=[1, 9], split=TtftSplit(40.0))
        for i in range(90)
    ]
    return [*made, broken(90), broken(91, FailureCause.TIMEOUT, sent_s=9.0)]


def check(page: str) -> list[str]:
    """The headings of a page whose tables are whole: all lines of a table have as many cells as its head."""
    lines = page.splitlines()
    for before, line in itertools.pairwise(lines):
        if before.startswith("|") and line.startswith("|"):
            assert before.replace(r"\|", "").count("|") == line.replace(r"\|", "").count("|")
    return [line.lstrip("# ") for line in lines if line.startswith("#")]


def test_a_run_has_its_figures() -> None:
    run = result(records())
    page = render_run(summarize(run))
    assert check(page)[1:] == ["Latency, ms", "Server's TTFT split, ms", "Failures"]
    assert "goodput" in page
    assert "timeout" in page


@pytest.mark.parametrize("made", [[], [broken(0)], [answered(0, times_s=[0.1])]], ids=len)
def test_runs_with_next_to_nothing_have_a_page_too(made: list[RequestRecord]) -> None:
    for run in (result(made), result(made, slo=None)):
        check(render_run(summarize(run)))


def test_what_a_server_says_does_not_break_a_table() -> None:
    evil = broken(0)
    assert evil.failure is not None
    evil.failure = type(evil.failure)(evil.failure.cause, "a | b\n# c", "kind")
    page = render_run(summarize(result([evil])))
    assert "c" not in check(page)
    assert r"a \| b # c" in page


def test_invalid_and_partial_runs_say_so() -> None:
    run = result([answered(0, sent_s=1.0, times_s=[1.1], due_s=0.5)], stopped="the target was gone")
    page = render_run(summarize(run))
    assert "fell behind its schedule" in page
    assert "the target was gone" in page


def test_sweeps_stand_side_by_side() -> None:
    run = result(records())
    sweep = Sweep(run.config, SearchSpace())
    for rate in (2.0, 1.0):
        sweep.add(rate, f"rate-{rate:g}", run)
    page = render_sweeps("two", {"a": sweep.as_json(), "b": sweep.as_json()})
    assert check(page) == ["two", "Points"]
    rows = [line.split("|")[1:3] for line in page.partition("## Points")[2].splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in row] for row in rows[2:]] == [["a", "1"], ["a", "2"], ["b", "1"], ["b", "2"]]
    assert check(render_sweeps("none", {"": Sweep(run.config, SearchSpace()).as_json()})) == ["none"]
