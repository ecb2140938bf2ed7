"""The page of a comparison."""

from __future__ import annotations

from html import escape

from loadtest.compare import Comparison
from loadtest.metrics import RequestMetrics, request_metrics
from loadtest.report.page import DEFINITIONS, Cell, figures, heading, page, section, table
from loadtest.report.plots import cdf_plot
from loadtest.report.rate_plots import attainment_rate_plot, goodput_rate_plot, latency_rate_plot
from loadtest.report.run_page import slo_of
from loadtest.results import REQUESTS, read_requests
from loadtest.sweep import sweep_points
from loadtest.tables import slo_text


def render_comparison(comparison: Comparison) -> str:
    """Reads the runs' requests for the distributions."""
    first = comparison.contents[0]
    subtitle = f"{first['workload']} · {slo_text(first) or 'no targets'} · {first['model_id']}"
    title = " against ".join(comparison.names)
    warnings = "".join(
        f'<p class="banner warn"><b>Warning:</b> {escape(difference)}</p>' for difference in comparison.differences
    )
    body = [
        heading(title, subtitle),
        warnings,
        section("Side by side", _table(comparison)),
        section("Plots", figures(_sweep_plots(comparison) if comparison.kind == "sweep" else _run_plots(comparison))),
        DEFINITIONS,
    ]
    return page(title, "\n".join(part for part in body if part))


def _table(comparison: Comparison) -> str:
    rows: list[list[str | Cell]] = [
        [row.name, *(Cell(text, "best" if i == row.best else "") for i, text in enumerate(row.texts))]
        for row in comparison.rows
    ]
    return table(["", *comparison.names], rows)


def _run_plots(comparison: Comparison) -> list[tuple[str, str, str]]:
    found: dict[str, list[RequestMetrics]] = {
        name: [m for record in read_requests(folder / REQUESTS) if (m := request_metrics(record)) is not None]
        for name, folder in zip(comparison.names, comparison.folders, strict=True)
    }
    slo = slo_of(comparison.contents[0])
    ttft = {name: [m.ttft_s for m in metrics] for name, metrics in found.items()}
    tpot = {name: [m.tpot_s for m in metrics if m.tpot_s is not None] for name, metrics in found.items()}
    return [
        (
            "TTFT",
            "Share of answers whose first token came within this time.",
            cdf_plot(ttft, slo.ttft_s if slo else None, "TTFT"),
        ),
        (
            "TPOT",
            "Share of answers whose time per output token was at most this.",
            cdf_plot(tpot, slo.tpot_s if slo else None, "TPOT"),
        ),
    ]


def _sweep_plots(comparison: Comparison) -> list[tuple[str, str, str]]:
    named = dict(zip(comparison.names, comparison.contents, strict=True))
    sweeps = {name: sweep_points(dict(content)) for name, content in named.items()}
    first = comparison.contents[0]
    plots = [
        (
            "Goodput against rate",
            "Requests per second that met both targets; dashed: all offered requests.",
            goodput_rate_plot(sweeps),
        ),
        (
            "Attainment against rate",
            "Share of the offered requests that met both targets.",
            attainment_rate_plot(sweeps, first["wanted_attainment"]),
        ),
    ]
    for key, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        name = f"p99_{key}_ms"
        series = {
            label: [(row["offered_rate"], row[name]) for row in content["points"] if row[name] is not None]
            for label, content in named.items()
        }
        plots.append(
            (
                f"{title} p99 against rate",
                "Of complete answers.",
                latency_rate_plot(series, first["slo_ms"][key], f"{title} p99"),
            )
        )
    return plots
