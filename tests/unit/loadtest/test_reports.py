"""The pages: well-formed, self-contained, and true to their data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtest.compare import Row, compare
from loadtest.rate_search import Point, SearchSpace
from loadtest.records import FailureCause, RequestRecord, TtftSplit
from loadtest.report.chart import Axis, Chart
from loadtest.report.compare_page import render_comparison
from loadtest.report.plots import cdf_plot
from loadtest.report.rate_plots import goodput_rate_plot
from loadtest.report.run_page import render_run
from loadtest.report.scale import Scale, round_up
from loadtest.report.sweep_page import render_sweep
from loadtest.results import write_json, write_requests
from loadtest.summary import summarize
from loadtest.sweep import Sweep
from shared.errors import ConfigError
from tests.unit.loadtest.factories import answered, broken, result

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Fails on tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str, links: tuple[str, ...] = ()) -> list[ElementTree.Element]:
    """The drawings of a page that is whole and loads nothing."""
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert tuple(checker.links) == links
    assert not re.search(r"url\(|@import|<script|<link|https?://(?!h\b)", page.replace("http://www.w3.org", ""))
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).lower().replace("cannot", "")
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def records() -> list[RequestRecord]:
    made = [
        answered(
            i, sent_s=i / 10, times_s=[i / 10 + 0.05 + i / 500, i / 10 + 0.3], counts=[1, 9], split=TtftSplit(40.0)
        )
        for i in range(90)
    ]
    return [*made, broken(90), broken(91, FailureCause.TIMEOUT, sent_s=9.0)]


def test_a_run_has_all_its_plots_and_no_outside_resource() -> None:
    run = result(records())
    drawings = check(render_run(summarize(run), run.records))
    labels = {drawing.attrib["aria-label"] for drawing in drawings}
    assert labels == {
        "Distribution of TTFT",
        "Distribution of TPOT",
        "requests in flight over time",
        "output tokens/s over time",
        "TTFT split into its parts",
        "TTFT over time",
        "Attainment against the targets' scale",
        "Failures over time",
    }


@pytest.mark.parametrize(
    "made", [[], [broken(0)], [answered(0, times_s=[0.1])], [answered(0, times_s=[0.0, 0.0])]], ids=len
)
def test_runs_with_next_to_nothing_have_a_page_too(made: list[RequestRecord]) -> None:
    for slo_given in (True, False):
        run = result(made) if slo_given else result(made, slo=None)
        check(render_run(summarize(run), run.records))


def test_what_a_server_says_is_text_not_markup() -> None:
    evil = broken(0)
    assert evil.failure is not None
    evil.failure = type(evil.failure)(evil.failure.cause, "<script>alert(1)</script>", "<b>")
    run = result([evil])
    check(render_run(summarize(run), run.records))


def test_invalid_and_partial_runs_say_so_first() -> None:
    run = result([answered(0, sent_s=1.0, times_s=[1.1], due_s=0.5)], stopped="the target was gone")
    page = render_run(summarize(run), run.records)
    assert "Invalid:" in page
    assert "the target was gone" in page


def sweep_of(label: str, factor: float) -> Sweep:
    run = result(records())
    sweep = Sweep(run.config, SearchSpace())
    for rate in (1.0, 2.0, 4.0):
        sweep.add(rate, f"rate-{rate:g}", run)
    sweep.points = [Point(r, r, r * factor / max(r, 2), min(1.0, factor / max(r, 2))) for r in (1.0, 2.0, 4.0)]
    return sweep


def test_a_sweep_links_its_points() -> None:
    page = render_sweep(sweep_of("a", 2.0).as_json())
    links = tuple(f"rate-{rate}/report.html" for rate in (1, 2, 4))
    assert len(check(page, links)) == 4


def test_runs_are_compared_side_by_side_and_what_is_unfair_is_said(tmp_path: Path) -> None:
    for name, made in (("a", records()), ("b", records()[:50])):
        run = result(made)
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "summary.json", {**summarize(run), "seed": len(made), "label": f"system {name}"})
        write_requests(tmp_path / name / "requests.jsonl", run.records)
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert found.names == ("system a", "system b")
    assert found.differences == ("the seeds differ: 92, 50",)
    assert {row.name: row.best for row in found.rows}["goodput, req/s"] == 0
    assert len(check(render_comparison(found))) == 2


def test_sweeps_are_compared_and_a_sweep_with_a_run_is_not(tmp_path: Path) -> None:
    for name, factor in (("a", 2.0), ("b", 1.0)):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "sweep.json", sweep_of(name, factor).as_json())
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert found.names == ("a", "b"), "equal labels do not tell them apart: the folders' names do"
    assert len(check(render_comparison(found))) == 4
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "summary.json", {})
    with pytest.raises(ConfigError, match="cannot compare a run with a sweep"):
        compare([tmp_path / "a", tmp_path / "run"])


def test_the_target_line_stands_at_the_target() -> None:
    drawing = ElementTree.fromstring(cdf_plot({"": [0.01, 0.02, 0.1]}, 0.05, "TTFT"))
    limit = next(e for e in drawing.iter("line") if e.attrib["class"] == "limit")
    ticks = {e.text: float(e.attrib["x"]) for e in drawing.iter("text") if e.attrib.get("text-anchor") == "middle"}
    assert float(limit.attrib["x1"]) == pytest.approx((ticks["40"] + ticks["60"]) / 2, abs=0.2)


def test_invalid_points_are_hollow() -> None:
    drawing = goodput_rate_plot({"a": [Point(1, 1, 1, 1.0), Point(2, 2, 1, 0.5, valid=False)]})
    assert drawing.count('class="dot s0"') == 1
    assert drawing.count('class="hollow s0"') == 1


def test_scales_map_their_ends_and_tick_at_round_values() -> None:
    scale = Scale(0, 37, 100, 500)
    assert (scale(0), scale(37), scale(99)) == (100, 500, 500)
    assert scale.ticks() == [0, 10, 20, 30]
    assert Scale(0.25, 4, 0, 1, logarithmic=True).ticks() == [0.25, 0.5, 1, 2, 4]
    assert [round_up(v) for v in (0, 0.97, 12, 101)] == [1, 1.0, 12, 120]


def test_a_legend_that_does_not_fit_goes_on_in_another_row() -> None:
    chart = Chart(Axis(0, 1, "x"), Axis(0, 1, "y"), "several systems")
    names = [f"a system with a rather long name, number {i}" for i in range(3)]
    for i, name in enumerate(names):
        chart.add_line([(0, i / 3), (1, i / 3)], f"s{i}", name)
    drawing = chart.render()
    view = re.search(r'viewBox="0 (\S+) (\S+) (\S+)"', drawing)
    assert view is not None
    top, width, height = (float(part) for part in view.groups())
    assert (top, top + height) == (-36, chart.height)
    entries = re.findall(r'<text x="(\S+)" y="(\S+)" class="legend"[^>]*>([^<]*)<', drawing)
    assert [name for _, _, name in entries] == names
    assert len({y for _, y, _ in entries}) == 3
    assert all(float(x) + 6 * len(name) < width and float(y) > top for x, y, name in entries)


def test_nothing_is_ahead_in_a_tie() -> None:
    assert Row("goodput", (3.0, 4.0, 4.0), ("3", "4", "4"), better=1).best is None
    assert Row("goodput", (3.0, 4.0, 2.0), ("3", "4", "2"), better=1).best == 1
    assert Row("TTFT", (3.0, None, 2.0), ("3", "-", "2"), better=-1).best == 2
