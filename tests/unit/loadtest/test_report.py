"""The pages: well-formed, self-contained, and true to their data."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from loadtest.baseline.pairs import Interval
from loadtest.baseline.picture import Bar, interval_chart
from loadtest.rate_search import SearchSpace
from loadtest.records import FailureCause, RequestRecord, TtftSplit
from loadtest.report import render_run, render_sweep
from loadtest.summary import summarize
from loadtest.sweep import Sweep
from tests.unit.loadtest.factories import answered, broken, result


def check(page: str) -> list[ElementTree.Element]:
    """The drawings of a page that is whole and loads nothing."""
    whole = ElementTree.fromstring(page.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', ""))
    assert not re.search(r"url\(|@import|<script|<link|src=|href=", page)
    return list(whole.iter("svg"))


def records() -> list[RequestRecord]:
    made = [
        answered(i, sent_s=i / 10, times_s=[i / 10 + 0.05, i / 10 + 0.3], counts=[1, 9], split=TtftSplit(40.0))
        for i in range(90)
    ]
    return [*made, broken(90), broken(91, FailureCause.TIMEOUT, sent_s=9.0)]


def test_a_run_has_its_figures_and_both_distributions() -> None:
    run = result(records())
    page = render_run(summarize(run), run.records)
    assert [svg.attrib["aria-label"] for svg in check(page)] == ["Distribution of TTFT", "Distribution of TPOT"]
    assert all(part in page for part in ("goodput", "TTFT split", "Failures", "timeout"))


@pytest.mark.parametrize("made", [[], [broken(0)], [answered(0, times_s=[0.1])]], ids=len)
def test_runs_with_next_to_nothing_have_a_page_too(made: list[RequestRecord]) -> None:
    for run in (result(made), result(made, slo=None)):
        check(render_run(summarize(run), run.records))


def test_what_a_server_says_is_text_not_markup() -> None:
    evil = broken(0)
    assert evil.failure is not None
    evil.failure = type(evil.failure)(evil.failure.cause, "<script>alert(1)</script>", "<b>")
    run = result([evil])
    check(render_run(summarize(run), run.records))


def test_invalid_and_partial_runs_say_so() -> None:
    run = result([answered(0, sent_s=1.0, times_s=[1.1], due_s=0.5)], stopped="the target was gone")
    page = render_run(summarize(run), run.records)
    assert "fell behind its schedule" in page
    assert "the target was gone" in page


def test_a_sweep_is_drawn_over_the_rate() -> None:
    run = result(records())
    sweep = Sweep(run.config, SearchSpace())
    for rate in (1.0, 2.0):
        sweep.add(rate, f"rate-{rate:g}", run)
    drawings = check(render_sweep(sweep.as_json()))
    assert len(drawings) == 4
    assert all(len(list(svg.iter("polyline"))) == 1 for svg in drawings)
    assert len(check(render_sweep(Sweep(run.config, SearchSpace()).as_json()))) == 0


def test_intervals_are_bars_on_one_axis_and_end_at_its_edge() -> None:
    near, far = Interval(1.1, 1.0, 1.2), Interval(3.0, 0.2, 40.0)
    text = interval_chart("two <systems>", [Bar("a / b", near, False), Bar("b / b", far, True)])
    svg = ElementTree.fromstring(text)
    assert svg.attrib["aria-label"] == "two <systems>"
    bars = [line for line in svg.iter("line") if line.attrib["class"].startswith("line")]
    first, second = ([float(bar.attrib[x]) for x in ("x1", "x2")] for bar in bars)
    middle = float(next(line for line in svg.iter("line") if line.attrib["class"] == "limit").attrib["x1"])
    assert second[0] < first[0] == middle < first[1] < second[1]
    assert interval_chart("none", []) == ""
