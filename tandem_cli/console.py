"""The look of what `tandem` prints: its console, and one kind of table."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console_of(piped_width: int) -> Console:
    """As wide as the terminal; without one `piped_width` columns."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else piped_width)


def table_of(
    headers: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    text: Collection[str] = (),
    *,
    title: str = "",
    folds: Collection[str] = (),
    header_style: str = "bold",
) -> Table:
    """A table without lines. Columns are numbers, to the right, but those of `text`; a cell of `folds` alone may take
    several lines. A row may end early. No text is read as markup: names come from outside."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style=header_style)
    for header in headers:
        table.add_column(
            Text(header),
            justify="left" if header in text or header in folds else "right",
            no_wrap=header not in folds,
            overflow="fold" if header in folds else "ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def json_of(message: Message) -> str:
    """With the names of the protocol's fields; those that were not set are there too."""
    return MessageToJson(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def share(part: int, whole: int) -> str:
    """`25 %`; `-` where the whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"
