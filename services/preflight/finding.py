"""What one check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It runs, but slower or shorter than it could."""
    FAIL = "fail"
    """It would not start, or not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    text: str
    fix: str = ""
    """What to change; empty where nothing has to."""


def ok(check: str, text: str) -> Finding:
    """Nothing to change."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, fix: str) -> Finding:
    """Worth changing."""
    return Finding(check, Level.WARN, text, fix)


def fail(check: str, text: str, fix: str) -> Finding:
    """Has to change."""
    return Finding(check, Level.FAIL, text, fix)


def failed(findings: Iterable[Finding]) -> bool:
    """Whether one of them has failed."""
    return any(finding.level is Level.FAIL for finding in findings)


def worst(findings: Iterable[Finding]) -> Finding:
    """The first of the worst level; there must be one."""
    order = list(Level)
    return max(findings, key=lambda finding: order.index(finding.level))
