"""Tables in Markdown: used by every benchmark's output and the pages under docs/benchmarks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """One line a row; the columns numbered in `left` are aligned left, all others right.

    Raises ValueError for a row with a wrong number of cells.
    """
    lines = [_line(columns), _line(["---" if number in left else "---:" for number in range(len(columns))])]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{len(row)} cells for {len(columns)} columns: {row}")
        lines.append(_line(row))
    return "\n".join(lines)


def bold(text: str, when: bool = True) -> str:
    """The text, in bold if `when`."""
    return f"**{text}**" if when else text


def _line(cells: Sequence[str]) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"
