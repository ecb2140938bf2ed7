"""The common frame of all plots: axes with ticks and grid, series, and a legend above."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.report import svg
from loadtest.report.scale import Scale, tick_text

WIDTH, HEIGHT = 560.0, 290.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 14.0, 30.0, 44.0
_LEGEND_ROW = 18.0
_CHAR_WIDTH = 6.3
"""Approximate width of a character of the legend: SVG text cannot be measured here."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its range and labels."""

    low: float
    high: float
    title: str
    logarithmic: bool = False
    labels: Sequence[str] | None = None
    """Names of categories at 0, 1, 2, …, instead of ticks."""
    percent: bool = False


@dataclass(slots=True)
class Chart:
    """Draws series in data coordinates; `render` finishes it. Colours are the page's classes s0, s1, …"""

    x_axis: Axis
    y_axis: Axis
    label: str
    """What the plot shows, for screen readers."""
    height: float = HEIGHT
    _marks: list[str] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)  # text drawn above all marks
    _legend: list[tuple[str, str]] = field(default_factory=list)

    @property
    def x(self) -> Scale:
        """Data to pixels."""
        return Scale(self.x_axis.low, self.x_axis.high, _LEFT, WIDTH - _RIGHT, self.x_axis.logarithmic)

    @property
    def y(self) -> Scale:
        """Data to pixels, upwards."""
        return Scale(self.y_axis.low, self.y_axis.high, self.height - _BOTTOM, _TOP, self.y_axis.logarithmic)

    def add_line(
        self, points: Sequence[svg.Point], color: str, name: str = "", filled: Sequence[bool] | None = None
    ) -> None:
        """A line through data points; with `filled`, a dot at each, hollow where `filled` is False."""
        if not points:
            return
        pixels = [(self.x(px), self.y(py)) for px, py in points]
        self._marks.append(svg.polyline(pixels, f"line {color}"))
        for i, full in enumerate(filled or ()):
            (px, py), (x, y) = points[i], pixels[i]
            cls = f"dot {color}" if full else f"hollow {color}"
            self._marks.append(svg.circle(x, y, 3.5, cls, f"{name} {px:.4g}: {py:.4g}".strip()))
        self._name(name, color)

    def add_area(self, points: Sequence[svg.Point], color: str, name: str = "") -> None:
        """The area between a line and the axis."""
        if not points:
            return
        pixels = [(self.x(px), self.y(py)) for px, py in points]
        base = self.y(self.y_axis.low)
        self._marks.append(svg.polygon([(pixels[0][0], base), *pixels, (pixels[-1][0], base)], f"area {color}"))
        self._marks.append(svg.polyline(pixels, f"line {color}"))
        self._name(name, color)

    def add_bar(self, x_from: float, x_to: float, y_from: float, y_to: float, color: str, tip: str = "") -> None:
        """A box in data coordinates, with half a pixel of space on each side."""
        left, right, top = self.x(x_from) + 0.5, self.x(x_to) - 0.5, self.y(y_to)
        self._marks.append(svg.rectangle(left, top, right - left, self.y(y_from) - top, f"bar {color}", tip))

    def add_dots(self, points: Sequence[svg.Point], color: str, name: str = "") -> None:
        """Dots without a line."""
        self._marks += [svg.circle(self.x(px), self.y(py), 2.0, f"mark {color}") for px, py in points]
        if points:
            self._name(name, color)

    def add_vertical(self, value: float, name: str) -> None:
        """A limit on the x axis, with its name at the bottom."""
        x, bottom = self.x(value), self.height - _BOTTOM
        self._marks.append(svg.line(x, _TOP, x, bottom, "limit"))
        near_end = x > WIDTH - _RIGHT - 100
        anchor = "end" if near_end else "start"
        self._notes.append(svg.text(x + (-6 if near_end else 6), bottom - 9, name, "limit-text", anchor))

    def add_horizontal(self, value: float, name: str, name_left: bool = False) -> None:
        """A limit on the y axis, with its name at one end."""
        y = self.y(value)
        self._marks.append(svg.line(_LEFT, y, WIDTH - _RIGHT, y, "limit"))
        x, anchor = (_LEFT + 5, "start") if name_left else (WIDTH - _RIGHT - 4, "end")
        self._notes.append(svg.text(x, y - 6, name, "limit-text", anchor))

    def name_color(self, name: str, color: str) -> None:
        """A legend entry for marks without a name of their own."""
        self._name(name, color)

    def render(self) -> str:
        """The drawing."""
        rows = self._legend_rows()
        parts = [self._draw_grid(), *self._marks, *self._notes, self._draw_axes(), _draw_legend(rows)]
        # Each further row of the legend is above the one before; the drawing grows by it.
        return svg.document(WIDTH, self.height, "".join(parts), self.label, top=_LEGEND_ROW * (1 - len(rows)))

    def _name(self, name: str, color: str) -> None:
        if name and (name, color) not in self._legend:
            self._legend.append((name, color))

    def _draw_grid(self) -> str:
        lines = [svg.line(_LEFT, self.y(v), WIDTH - _RIGHT, self.y(v), "grid") for v in self.y.ticks(5)]
        return "".join(lines)

    def _draw_axes(self) -> str:
        bottom = self.height - _BOTTOM
        parts = [svg.line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "axis")]
        for value in self.y.ticks(5):
            label = f"{value:.0%}" if self.y_axis.percent else tick_text(value)
            parts.append(svg.text(_LEFT - 7, self.y(value) + 4, label, "tick", "end"))
        if self.x_axis.labels is not None:
            for i, label in enumerate(self.x_axis.labels):
                parts.append(svg.text(self.x(i), bottom + 16, label, "tick", "middle"))
        else:
            for value in self.x.ticks():
                parts.append(svg.line(self.x(value), bottom, self.x(value), bottom + 4, "axis"))
                parts.append(svg.text(self.x(value), bottom + 17, tick_text(value), "tick", "middle"))
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(svg.text(middle, self.height - 8, self.x_axis.title, "axis-title", "middle"))
        parts.append(svg.text(13, (bottom + _TOP) / 2, self.y_axis.title, "axis-title", "middle", rotate=-90))
        return "".join(parts)

    def _legend_rows(self) -> list[list[tuple[float, str, str]]]:
        """The entries as (x, name, colour), in as many rows as needed."""
        rows: list[list[tuple[float, str, str]]] = []
        x = math.inf
        for name, color in self._legend:
            width = 15 + len(name) * _CHAR_WIDTH
            if x + width > WIDTH:
                rows.append([])
                x = _LEFT
            rows[-1].append((x, name, color))
            x += width + 16
        return rows


def _draw_legend(rows: Sequence[Sequence[tuple[float, str, str]]]) -> str:
    parts: list[str] = []
    for i, row in enumerate(rows):
        y = 10 - _LEGEND_ROW * (len(rows) - 1 - i)
        for x, name, color in row:
            parts.append(svg.rectangle(x, y, 10, 10, f"bar {color}"))
            parts.append(svg.text(x + 15, y + 9, name, "legend"))
    return "".join(parts)
