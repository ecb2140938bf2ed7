"""Intervals of ratios as an SVG drawing: a row each, on one axis with 1 in its middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from loadtest.baseline.pairs import Interval
from loadtest.chart import round_step

_WIDTH, _ROW, _TOP, _BELOW = 760, 24, 10, 44
_LEFT, _RIGHT = 250, 740
_NUM_TICKS = 8
_MOST = 0.5
"""Half of the axis at most: what is farther away ends at its edge."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row."""

    label: str
    interval: Interval
    is_same: bool
    """Whether it compares a system with itself."""


def interval_chart(label: str, bars: Sequence[Bar]) -> str:
    """A row each, dim for a system against itself; "" without any."""
    if not bars:
        return ""
    reach = max(abs(edge - 1) for bar in bars for edge in (bar.interval.low, bar.interval.high))
    half = min(max(reach * 1.05, 0.02), _MOST)
    bottom = _TOP + _ROW * len(bars)

    def x(ratio: float) -> float:
        share = (ratio - 1 + half) / (2 * half)
        return _LEFT + (_RIGHT - _LEFT) * min(max(share, 0.0), 1.0)

    parts = []
    step = round_step(2 * half / _NUM_TICKS)
    most = int(half / step + 1e-9)
    for tick in (1 + step * k for k in range(-most, most + 1)):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" y1="{_TOP}" x2="{x(tick):.1f}" y2="{bottom}"/>')
        parts.append(_text(x(tick), bottom + 17, f"{tick:.4g}", "tick", "middle"))
    parts.append(f'<line class="limit" x1="{x(1):.1f}" y1="{_TOP}" x2="{x(1):.1f}" y2="{bottom}"/>')
    parts.append(_text((_LEFT + _RIGHT) / 2, bottom + 36, "ratio of goodput, 95 % interval", "tick", "middle"))
    for row, bar in enumerate(bars):
        y, found = _TOP + _ROW * (row + 0.5), bar.interval
        colour = "s1" if bar.is_same else "s0"
        parts.append(_text(_LEFT - 12, y + 4, bar.label, "tick" if bar.is_same else "", "end"))
        parts.append(
            f'<line class="line {colour}" x1="{x(found.low):.1f}" y1="{y:.1f}" x2="{x(found.high):.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<circle class="bar {colour}" cx="{x(found.ratio):.1f}" cy="{y:.1f}" r="4"/>')
    view = f"0 0 {_WIDTH} {bottom + _BELOW}"
    return f'<svg viewBox="{view}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, content: str, cls: str, anchor: str) -> str:
    return f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
