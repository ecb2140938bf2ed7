"""The findings as text, as JSON, and as a Pod's termination message."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.preflight.finding import Finding, Level, failed

MAX_MESSAGE_BYTES = 4096
"""Bytes that Kubernetes keeps of a container's termination message."""
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
_LEVEL_COLUMNS, _CHECK_COLUMNS = 5, 9


def print_finding(console: Console, finding: Finding) -> None:
    """One line, and one for the fix; on a terminal they are wrapped within their column."""
    style = _STYLES[finding.level]
    if not console.is_terminal:
        head = f"{finding.level:<{_LEVEL_COLUMNS}} {finding.check:<{_CHECK_COLUMNS}} "
        console.print(head + finding.text, markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':<{len(head)}}fix: {finding.fix}", markup=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LEVEL_COLUMNS)
    table.add_column(width=_CHECK_COLUMNS)
    table.add_column(overflow="fold")
    table.add_row(Text(finding.level, style), Text(finding.check), Text(finding.text))
    if finding.fix:
        table.add_row("", "", Text.assemble(("fix: ", style), finding.fix))
    console.print(table)


def summary(findings: Sequence[Finding]) -> str:
    """`9 ok, 1 warn, 0 fail`."""
    return ", ".join(f"{sum(finding.level is level for finding in findings)} {level}" for level in Level)


def as_json(component: str, findings: Sequence[Finding]) -> str:
    """One object: component, whether it may start, findings."""
    lines = [
        {"check": finding.check, "level": finding.level, "text": finding.text, "fix": finding.fix}
        for finding in findings
    ]
    return json.dumps({"component": component, "passed": not failed(findings), "findings": lines}, indent=2)


def termination_message(findings: Sequence[Finding]) -> str:
    """Failed checks with their fixes, at most MAX_MESSAGE_BYTES; empty where none failed."""
    lines = [
        f"{finding.check}: {finding.text}. Fix: {finding.fix}" for finding in findings if finding.level is Level.FAIL
    ]
    text = "\n".join(lines)
    return text.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")


def write_termination_message(path: Path, findings: Sequence[Finding]) -> str:
    """Writes it where the file is there already, as in a Pod. Returns why it could not, or an empty text."""
    if not failed(findings) or not os.path.exists(path):
        return ""
    try:
        path.write_text(termination_message(findings))
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""
