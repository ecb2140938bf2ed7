"""The page of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.rate_search import Point
from loadtest.report.page import DEFINITIONS, Cell, Tile, facts, figures, heading, page, section, table, tiles
from loadtest.report.rate_plots import attainment_rate_plot, goodput_rate_plot, latency_rate_plot
from loadtest.sweep import sweep_points
from loadtest.tables import number, slo_text


def render_sweep(sweep: Mapping[str, Any]) -> str:
    """Made from the content of `sweep.json`; points link to their own reports in the same folder."""
    title = sweep["label"] or sweep["workload"]
    subtitle = (
        f"{sweep['target']} · {sweep['model_id']} · {sweep['workload']} · {slo_text(sweep)} · "
        f"seed {sweep['seed']} · {sweep['date']}"
    )
    partial = f'<p class="banner warn"><b>Partial:</b> {sweep["partial_reason"]}</p>' if sweep["partial"] else ""
    points = sweep_points(dict(sweep))
    bend = None if sweep["knee"] is None else Point(**sweep["knee"])
    slo = sweep["slo_ms"]
    rows = sweep["points"]
    plots = [
        (
            "Goodput against rate",
            "Requests per second that met both targets; dashed: all offered requests; hollow: invalid.",
            goodput_rate_plot({"": points}, bend),
        ),
        (
            "Attainment against rate",
            "Share of the offered requests that met both targets.",
            attainment_rate_plot({"": points}, sweep["wanted_attainment"]),
        ),
    ]
    for key, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
        series = {
            stat: [
                (row["offered_rate"], row[f"{stat}_{key}_ms"]) for row in rows if row[f"{stat}_{key}_ms"] is not None
            ]
            for stat in ("p50", "p99")
        }
        plots.append((f"{name} against rate", "Of complete answers.", latency_rate_plot(series, slo[key], name)))
    body = [
        heading(title, subtitle),
        partial,
        tiles(sweep_tiles(sweep)),
        figures(plots),
        section("Points", _points_table(sweep)),
        section("Search", facts(_search_facts(sweep))),
        DEFINITIONS,
    ]
    return page(f"{title} - sweep", "\n".join(part for part in body if part))


def sweep_tiles(sweep: Mapping[str, Any]) -> list[Tile]:
    """The results of a sweep."""
    wanted = f"{sweep['wanted_attainment']:.0%}"
    best, strict, bend = sweep["max_goodput"], sweep["max_goodput_at_99"], sweep["knee"]
    note = "" if sweep["limit_found"] else "the limit is higher: no rate missed the targets"
    items = [
        _tile(f"Max goodput at ≥ {wanted}", best, note, "good" if best else "bad"),
        _tile("Max goodput at ≥ 99%", strict, "", ""),
    ]
    items.append(
        Tile(
            "Knee",
            "-" if bend is None else number(bend["offered_rate"]),
            "" if bend is None else "req/s offered",
            "not reached" if bend is None else f"goodput {number(bend['goodput'])} req/s",
        )
    )
    return items


def _tile(name: str, point: Mapping[str, Any] | None, note: str, mood: str) -> Tile:
    if point is None:
        return Tile(name, "none", "", note or "no measured rate met it", mood)
    found = f"{point['attainment']:.1%} of {number(point['offered_rate'])} req/s offered"
    return Tile(name, number(point["goodput"]), "req/s", f"{found}; {note}" if note else found, mood)


def _points_table(sweep: Mapping[str, Any]) -> str:
    names = [
        "rate",
        "offered",
        "goodput",
        "attainment",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "out tok/s",
        "failed",
        "lag p99",
    ]
    rows: list[list[str | Cell]] = []
    classes = []
    for row in sweep["points"]:
        rows.append(
            [
                Cell(f"{row['rate']:g}", "", f"{row['folder']}/report.html"),
                number(row["offered_rate"]),
                number(row["goodput"]),
                f"{row['attainment']:.1%}" + ("" if row["valid"] else " (invalid)"),
                *(number(row[f"{stat}_{key}_ms"]) for key in ("ttft", "tpot") for stat in ("p50", "p99")),
                number(row["output_throughput"]),
                str(row["failed"]),
                number(row["lag_p99_ms"]),
            ]
        )
        classes.append("" if row["valid"] and row["attainment"] >= sweep["wanted_attainment"] else "miss")
    return table(names, rows, classes)


def _search_facts(sweep: Mapping[str, Any]) -> list[tuple[str, str]]:
    limits = sweep["config"]["limits"]
    bounds = [f"{limits['duration_s']:g} s"] if limits["duration_s"] else []
    bounds += [f"{limits['num_requests']} requests"] if limits["num_requests"] else []
    return [
        ("each point", " or ".join(bounds)),
        (
            "grey rows",
            f"below {sweep['wanted_attainment']:.0%} attainment, or invalid: the generator fell behind twice",
        ),
        ("seeds", "each point's own, from the sweep's seed and the rate"),
    ]
