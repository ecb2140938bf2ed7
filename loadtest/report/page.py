"""Building blocks of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from loadtest.report.style import STYLE


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline figure."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    mood: str = ""  # "good", "bad" or empty


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell that is more than plain text."""

    text: str
    cls: str = ""
    link: str = ""


def page(title: str, body: str) -> str:
    """A complete HTML document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def heading(title: str, subtitle: str) -> str:
    """The page's head."""
    return f'<h1>{escape(title)}</h1>\n<p class="subtitle">{escape(subtitle)}</p>\n'


def banners(summary: Mapping[str, Any]) -> str:
    """Banners that say why a run's figures are not to be trusted."""
    parts = [_banner("bad", "Invalid", reason) for reason in summary["invalid_reasons"]]
    if summary["partial"]:
        parts.append(_banner("warn", "Partial", summary["partial_reason"]))
    return "\n".join(parts)


def _banner(mood: str, word: str, text: str) -> str:
    return f'<p class="banner {mood}"><b>{word}:</b> {escape(text)}</p>'


def tiles(items: Sequence[Tile]) -> str:
    """Headline figures in a row."""
    parts = []
    for tile in items:
        unit = f" <small>{escape(tile.unit)}</small>" if tile.unit else ""
        parts.append(
            f'<div class="tile {tile.mood}"><div class="name">{escape(tile.name)}</div>'
            f'<div class="value">{escape(tile.value)}{unit}</div><div class="note">{escape(tile.note)}</div></div>'
        )
    return f'<div class="tiles">{"".join(parts)}</div>\n'


def figures(items: Sequence[tuple[str, str, str]]) -> str:
    """Plots with a title and one explaining line; those without a drawing are left out."""
    parts = [
        f"<figure><h3>{escape(title)}</h3><p>{escape(note)}</p>{drawing}</figure>"
        for title, note, drawing in items
        if drawing
    ]
    return f'<div class="plots">{"".join(parts)}</div>\n' if parts else ""


def table(head: Sequence[str | Cell], rows: Sequence[Sequence[str | Cell]], row_classes: Sequence[str] = ()) -> str:
    """A table whose first column is text."""
    lines = ["<tr>" + "".join(_cell(cell, "th") for cell in head) + "</tr>"]
    for i, row in enumerate(rows):
        cls = f' class="{row_classes[i]}"' if i < len(row_classes) and row_classes[i] else ""
        lines.append(f"<tr{cls}>" + "".join(_cell(cell) for cell in row) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>\n'


def _cell(cell: str | Cell, name: str = "td") -> str:
    if isinstance(cell, str):
        return f"<{name}>{escape(cell)}</{name}>"
    cls = f' class="{cell.cls}"' if cell.cls else ""
    content = f'<a href="{escape(cell.link)}">{escape(cell.text)}</a>' if cell.link else escape(cell.text)
    return f"<{name}{cls}>{content}</{name}>"


def facts(items: Sequence[tuple[str, str]]) -> str:
    """Names and values below each other."""
    return "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in items) + "</dl>\n"


def section(title: str, content: str) -> str:
    """A section of the page; empty if it has no content."""
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def details(title: str, content: str) -> str:
    """A section that is collapsed at first."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>\n"


DEFINITIONS = details(
    "How the figures are defined",
    facts(
        [
            ("TTFT", "from sending the request to the first token, at the client"),
            ("TPOT", "(last token - first token) / (output tokens - 1), per request"),
            ("ITL", "each gap between consecutive tokens; tokens of one message have gaps of 0"),
            ("E2E", "from sending the request to the last token"),
            (
                "attainment",
                "share of the offered requests that were answered and met both targets; failures are misses",
            ),
            ("goodput", "good requests per second of the time over which requests were offered"),
            ("percentiles", "of complete answers, interpolated linearly"),
            ("schedule lag", "how much later than scheduled a request was sent"),
        ]
    ),
)
