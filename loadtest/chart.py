"""Line charts as SVG text, in the colours of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 546, 30, 246
"""Edges of the plot's area, pixels."""
_NUM_TICKS = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from 0 to `high` and what they are."""

    title: str
    high: float
    limit: float | None = None
    """A target, drawn as a dashed line."""

    @property
    def ticks(self) -> list[float]:
        """Round values from 0 to `high`."""
        step = round_step(self.high / _NUM_TICKS)
        return [step * k for k in range(math.floor(self.high / step + 1e-9) + 1)]

    def share(self, value: float) -> float:
        """The place of a value between 0 and 1; values outside are put on the edge."""
        return min(max(value / self.high, 0.0), 1.0)


def line_chart(label: str, x: Axis, y: Axis, points: Points) -> str:
    """One drawing with one line; "" without points."""
    if not points:
        return ""
    path = " ".join(f"{_x(x, px):.1f},{_y(y, py):.1f}" for px, py in points)
    parts = [*_grid(x, y), *_limits(x, y), f'<polyline class="line s0" points="{path}"/>']
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def round_step(least: float) -> float:
    """The smallest value of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def round_up(value: float) -> float:
    """A round end of an axis for values up to `value`."""
    if value <= 0:
        return 1.0
    step = round_step(value / 8)
    return math.ceil(value / step - 1e-9) * step


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = [_line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis")]
    for value in y.ticks:
        parts.append(_line(_LEFT, _y(y, value), _RIGHT, _y(y, value), "grid"))
        parts.append(_text(_LEFT - 7, _y(y, value) + 4, f"{value:.4g}", "tick", "end"))
    for value in x.ticks:
        parts.append(_text(_x(x, value), _BOTTOM + 17, f"{value:.4g}", "tick", "middle"))
    parts.append(_text((_LEFT + _RIGHT) / 2, HEIGHT - 8, x.title, "tick", "middle"))
    middle = (_TOP + _BOTTOM) / 2
    turned = f' transform="rotate(-90 13 {middle})"'
    return [*parts, _text(13, middle, y.title, "tick", "middle", turned)]


def _limits(x: Axis, y: Axis) -> list[str]:
    parts = []
    if x.limit is not None:
        parts.append(_line(_x(x, x.limit), _TOP, _x(x, x.limit), _BOTTOM, "limit"))
    if y.limit is not None:
        parts.append(_line(_LEFT, _y(y, y.limit), _RIGHT, _y(y, y.limit), "limit"))
    return parts


def _x(axis: Axis, value: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * axis.share(value)


def _y(axis: Axis, value: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * axis.share(value)


def _line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    return f'<line class="{cls}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, content: str, cls: str, anchor: str = "start", more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{cls}" {place}{more}>{escape(content)}</text>'
