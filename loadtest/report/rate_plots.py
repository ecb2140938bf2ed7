"""Plots over rates: of one sweep, or of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.rate_search import Point
from loadtest.report.chart import Axis, Chart
from loadtest.report.scale import round_up


def goodput_rate_plot(sweeps: Mapping[str, Sequence[Point]], knee: Point | None = None) -> str:
    """Goodput against the offered rate; on the diagonal every request is good."""
    ordered = _ordered(sweeps)
    if not ordered:
        return ""
    high = round_up(max(point.offered_rate for points in ordered.values() for point in points) * 1.02)
    top = round_up(max(point.goodput for points in ordered.values() for point in points) * 1.15)
    chart = Chart(Axis(0, high, "offered, req/s"), Axis(0, top, "goodput, req/s"), "Goodput against rate")
    end = min(high, top)
    chart.add_line([(0.0, 0.0), (end, end)], "faint")
    for i, (name, points) in enumerate(ordered.items()):
        chart.add_line([(p.offered_rate, p.goodput) for p in points], f"s{i}", name, [p.valid for p in points])
    if knee is not None:
        chart.add_vertical(knee.offered_rate, f"knee {knee.offered_rate:.3g}")
    return chart.render()


def attainment_rate_plot(sweeps: Mapping[str, Sequence[Point]], wanted: float) -> str:
    """Share of the offered requests that met both targets, against the offered rate."""
    ordered = _ordered(sweeps)
    if not ordered:
        return ""
    high = round_up(max(point.offered_rate for points in ordered.values() for point in points) * 1.02)
    chart = Chart(Axis(0, high, "offered, req/s"), Axis(0, 1, "attainment", percent=True), "Attainment against rate")
    for i, (name, points) in enumerate(ordered.items()):
        chart.add_line([(p.offered_rate, p.attainment) for p in points], f"s{i}", name, [p.valid for p in points])
    chart.add_horizontal(wanted, f"{wanted:.0%}")
    return chart.render()


def latency_rate_plot(series: Mapping[str, Sequence[tuple[float, float]]], target_ms: float | None, name: str) -> str:
    """A latency in ms against the offered rate; values far above the target are drawn on the edge."""
    filled = {key: sorted(points) for key, points in series.items() if points}
    if not filled:
        return ""
    high = round_up(max(x for points in filled.values() for x, _ in points) * 1.02)
    top = max(y for points in filled.values() for _, y in points)
    if target_ms is not None:
        top = max(min(top, 4 * target_ms), 1.2 * target_ms)
    chart = Chart(Axis(0, high, "offered, req/s"), Axis(0, round_up(top), f"{name}, ms"), f"{name} against rate")
    for i, (key, points) in enumerate(filled.items()):
        chart.add_line(points, f"s{i}", key, [True] * len(points))
    if target_ms is not None:
        chart.add_horizontal(target_ms, f"target {target_ms:g} ms")
    return chart.render()


def _ordered(sweeps: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    return {name: sorted(points, key=lambda point: point.offered_rate) for name, points in sweeps.items() if points}
