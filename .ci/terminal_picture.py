"""Draws a terminal's text as an SVG: `tandem … | python .ci/terminal_picture.py "$ tandem …" > docs/images/NAME.svg`.

The first argument is the command line shown above the text. Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import sys
from xml.sax.saxutils import escape

CHAR_WIDTH, LINE_HEIGHT, MARGIN = 7.25, 17, 14
STYLE = (
    "svg{--ink:#1f2328;--box:#f6f8fa;--line:#d1d9e0;--prompt:#0969da}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--box:#151b23;--line:#3d444d;--prompt:#4493f8}}"
    "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:var(--ink);white-space:pre}"
    ".c{fill:var(--prompt);font-weight:600}rect{fill:var(--box);stroke:var(--line)}"
)


def draw(command: str, output: str) -> str:
    """The SVG of `command` and, below it, `output`; each line has its width set, whatever font a reader has."""
    lines = [command, *(line.rstrip() for line in output.strip("\n").splitlines())]
    width = round(max(map(len, lines)) * CHAR_WIDTH + 2 * MARGIN)
    height = len(lines) * LINE_HEIGHT + 2 * MARGIN
    rows = [_row(number, line) for number, line in enumerate(lines) if line]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(command)}</title><style>{STYLE}</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _row(number: int, line: str) -> str:
    name = "c" if number == 0 else "o"
    y = MARGIN + (number + 1) * LINE_HEIGHT - 5
    width = f"{len(line) * CHAR_WIDTH:.1f}"
    return f'<text class="{name}" x="{MARGIN}" y="{y}" textLength="{width}" xml:space="preserve">{escape(line)}</text>'


if __name__ == "__main__":
    print(draw(sys.argv[1], sys.stdin.read()), end="")
