"""The plots of one run, each drawn from its records; an empty text if there is nothing to draw."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from loadtest.metrics import RequestMetrics, needed_scale, request_metrics
from loadtest.records import TTFT_PARTS, RequestRecord
from loadtest.report.chart import Axis, Chart
from loadtest.report.scale import round_up
from loadtest.slo import Slo

Points = list[tuple[float, float]]

_MAX_POINTS = 400
"""Most points of one line: more cannot be seen."""
_GROUPS = 10
_PART_COLORS = {
    "queue": "s1",
    "placement": "s3",
    "reserve": "s4",
    "prefix fetch": "s2",
    "prefill queue": "s6",
    "prefill compute": "s0",
    "return": "s5",
    "other": "s7",
}


def cdf_plot(series: Mapping[str, Sequence[float]], target_s: float | None, name: str) -> str:
    """Cumulative distribution of `name` over the answers; values in seconds, drawn in ms."""
    series = {key: values for key, values in series.items() if len(values)}
    if not series:
        return ""
    highest_ms = max(float(np.percentile(list(values), 99.5)) for values in series.values()) * 1e3
    high = round_up(max(highest_ms, (target_s or 0.0) * 1e3 * 1.1, 1e-3))
    chart = Chart(Axis(0, high, f"{name}, ms"), Axis(0, 1, "share of answers", percent=True), f"Distribution of {name}")
    for i, (key, values) in enumerate(series.items()):
        chart.add_line(_cdf([value * 1e3 for value in values], high), f"s{i}", key if len(series) > 1 else "")
    if target_s is not None:
        chart.add_vertical(target_s * 1e3, f"target {target_s * 1e3:g} ms")
    return chart.render()


def _cdf(values: Sequence[float], high: float) -> Points:
    """A step at each value, thinned, up to the edge of the plot."""
    ordered = np.sort(np.asarray(values))
    chosen = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_POINTS)).astype(int))
    points: Points = [(0.0, 0.0)]
    for i in chosen:
        if ordered[i] > high:
            break
        points += [(float(ordered[i]), points[-1][1]), (float(ordered[i]), (int(i) + 1) / len(ordered))]
    return [*points, (high, points[-1][1])]


def timeline_plots(records: Sequence[RequestRecord], duration_s: float) -> tuple[str, str]:
    """Requests in flight, and output tokens per second, over the run."""
    edges = np.linspace(0.0, duration_s, int(min(max(2 * duration_s, 40), 150)) + 1)
    width_s = float(edges[1] - edges[0])
    in_flight = np.zeros(len(edges) - 1)
    tokens = np.zeros(len(edges) - 1)
    for record in records:
        reply = record.reply
        if reply.sent_s is None:
            continue
        closed_s = duration_s if reply.closed_s is None else reply.closed_s
        overlap = np.minimum(edges[1:], closed_s) - np.maximum(edges[:-1], reply.sent_s)
        in_flight += np.clip(overlap, 0.0, None) / width_s
        tokens += np.histogram(reply.token_times_s, edges, weights=reply.token_counts)[0] / width_s
    middles = (edges[1:] + edges[:-1]) / 2
    return (
        _time_plot(middles, in_flight, "requests in flight", "s0"),
        _time_plot(middles, tokens, "output tokens/s", "s1"),
    )


def _time_plot(middles: np.ndarray, values: np.ndarray, title: str, color: str) -> str:
    end_s = float(middles[-1] + middles[0])
    chart = Chart(
        Axis(0, end_s, "time from the start, s"),
        Axis(0, round_up(float(values.max())), title),
        f"{title} over time",
        height=200,
    )
    chart.add_area([(float(x), float(y)) for x, y in zip(middles, values, strict=True)], color)
    return chart.render()


def ttft_time_plot(records: Sequence[RequestRecord], slo: Slo | None, duration_s: float) -> str:
    """Each request's TTFT at the time it was sent; misses of a target in another colour."""
    good: Points = []
    missed: Points = []
    for record in _thinned(records):
        metrics = request_metrics(record)
        if metrics is not None and record.reply.sent_s is not None:
            hit = slo is None or slo.met(metrics.ttft_s, metrics.tpot_s)
            (good if hit else missed).append((record.reply.sent_s, metrics.ttft_s * 1e3))
    if not good and not missed:
        return ""
    target_ms = None if slo is None or slo.ttft_s is None else slo.ttft_s * 1e3
    high = round_up(max(max(y for _, y in good + missed), (target_ms or 0.0) * 1.1))
    chart = Chart(Axis(0, duration_s, "time sent, s"), Axis(0, high, "TTFT, ms"), "TTFT over time", height=200)
    chart.add_dots(good, "s0", "" if slo is None else "met both targets")
    chart.add_dots(missed, "s5", "missed a target")
    if target_ms is not None:
        chart.add_horizontal(target_ms, f"target {target_ms:g} ms")
    return chart.render()


def _thinned(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    return records[:: max(1, len(records) // 1500)]


def split_plot(records: Sequence[RequestRecord]) -> str:
    """The parts of the TTFT: means of ten groups of requests, from the fastest to the slowest."""
    answered: list[tuple[RequestRecord, RequestMetrics]] = []
    for record in records:
        metrics = request_metrics(record)
        if metrics is not None and record.reply.split is not None:
            answered.append((record, metrics))
    if not answered:
        return ""
    answered.sort(key=lambda pair: pair[1].ttft_s)
    num_groups = min(_GROUPS, len(answered))
    groups = [[answered[i] for i in part] for part in np.array_split(np.arange(len(answered)), num_groups)]
    stacks = [_mean_parts(group) for group in groups]
    high = round_up(max(sum(stack.values()) for stack in stacks))
    labels = [f"{100 * (i + 1) // num_groups}%" for i in range(num_groups)]
    chart = Chart(
        Axis(-0.6, num_groups - 0.4, "requests by TTFT, quickest to slowest", labels=labels),
        Axis(0, high, "mean TTFT, ms"),
        "TTFT split into its parts",
    )
    shown = [name for name in stacks[0] if any(stack[name] >= 0.005 * high for stack in stacks)]
    for name in shown:
        chart.name_color(name, _PART_COLORS[name])
    for column, stack in enumerate(stacks):
        base = 0.0
        for name, part_ms in stack.items():
            tip = f"{name}: {part_ms:.1f} ms"
            chart.add_bar(column - 0.4, column + 0.4, base, base + part_ms, _PART_COLORS[name], tip)
            base += part_ms
    return chart.render()


def _mean_parts(group: Sequence[tuple[RequestRecord, RequestMetrics]]) -> dict[str, float]:
    """Mean ms of each part of the server's split, and of the rest that the client measured."""
    parts: dict[str, float] = defaultdict(float)
    for record, metrics in group:
        split = record.reply.split
        assert split is not None
        known_ms = 0.0
        for name in TTFT_PARTS:
            part_ms = getattr(split, name)
            parts[name.removesuffix("_ms").replace("_", " ")] += part_ms / len(group)
            known_ms += part_ms
        parts["other"] += max(metrics.ttft_s * 1e3 - known_ms, 0.0) / len(group)
    return dict(parts)


def slo_scale_plot(records: Sequence[RequestRecord], slo: Slo) -> str:
    """Attainment if both targets were stricter or looser by a factor."""
    offered = [record for record in records if record.offered]
    if not offered:
        return ""
    needed = sorted(needed_scale(record, slo) for record in offered)
    factors = [float(f) for f in np.geomspace(0.25, 4.0, 65)]
    points = [(f, bisect_right(needed, f) / len(offered)) for f in factors]
    chart = Chart(
        Axis(0.25, 4.0, "both targets times", logarithmic=True),
        Axis(0, 1, "attainment", percent=True),
        "Attainment against the targets' scale",
    )
    chart.add_line(points, "s0")
    chart.add_vertical(1.0, "as asked")
    chart.add_horizontal(0.9, "90%", name_left=True)
    return chart.render()


def failures_plot(records: Sequence[RequestRecord], duration_s: float) -> str:
    """Failed requests per second by cause, when they ended."""
    num_bins = int(min(max(duration_s, 10), 60))
    width_s = duration_s / num_bins
    counts: dict[str, list[float]] = {}
    for record in records:
        if record.failure is not None and record.offered:
            at_s = record.reply.closed_s or record.reply.sent_s or 0.0
            bins = counts.setdefault(record.failure.cause.value, [0.0] * num_bins)
            bins[min(int(at_s / width_s), num_bins - 1)] += 1 / width_s
    if not counts:
        return ""
    totals = [sum(bins) for bins in zip(*counts.values(), strict=True)]
    chart = Chart(
        Axis(0, duration_s, "time from the start, s"),
        Axis(0, round_up(max(totals)), "failures/s"),
        "Failures over time",
        height=200,
    )
    base = [0.0] * num_bins
    for i, (cause, bins) in enumerate(counts.items()):
        color = f"s{(i + 5) % 8}"
        chart.name_color(cause, color)
        for k, value in enumerate(bins):
            if value:
                chart.add_bar(
                    k * width_s, (k + 1) * width_s, base[k], base[k] + value, color, f"{cause}: {value:.2g}/s"
                )
                base[k] += value
    return chart.render()
