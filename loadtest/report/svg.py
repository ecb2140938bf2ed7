"""SVG elements as text. Colours are CSS classes of the page, so that plots follow its light and dark themes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]


def element(name: str, content: str = "", /, **attributes: str | float | None) -> str:
    """One element; `content` is markup. An underscore in an attribute's name becomes a hyphen, `cls` is `class`."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            text = coordinate(value) if isinstance(value, int | float) else escape(value)
            parts.append(f'{"class" if key == "cls" else key.replace("_", "-")}="{text}"')
    opening = " ".join(parts)
    return f"<{opening}>{content}</{name}>" if content else f"<{opening}/>"


def coordinate(value: float) -> str:
    """At most one decimal: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, cls: str = "", anchor: str = "start", rotate: float | None = None) -> str:
    """A line of text; `content` is plain."""
    transform = None if rotate is None else f"rotate({coordinate(rotate)} {coordinate(x)} {coordinate(y)})"
    return element("text", escape(content), x=x, y=y, cls=cls or None, text_anchor=anchor, transform=transform)


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, cls=cls)


def polyline(points: Sequence[Point], cls: str) -> str:
    """Connected points."""
    path = " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in points)
    return element("polyline", points=path, cls=cls)


def polygon(points: Sequence[Point], cls: str) -> str:
    """A filled area."""
    path = " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in points)
    return element("polygon", points=path, cls=cls)


def rectangle(x: float, y: float, width: float, height: float, cls: str, tip: str = "") -> str:
    """A filled box; `tip` is its tooltip."""
    return element("rect", _tip(tip), x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), cls=cls)


def circle(x: float, y: float, radius: float, cls: str, tip: str = "") -> str:
    """A dot."""
    return element("circle", _tip(tip), cx=x, cy=y, r=radius, cls=cls)


def document(width: float, height: float, content: str, label: str, top: float = 0.0) -> str:
    """A complete drawing that fills the available width; `label` is for screen readers, `top` is cut off."""
    view = f"0 {coordinate(top)} {coordinate(width)} {coordinate(height - top)}"
    return element("svg", content, viewBox=view, role="img", aria_label=label)


def _tip(content: str) -> str:
    return element("title", escape(content)) if content else ""
