"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """The component runs, but slower or shorter than it could."""
    FAIL = "fail"
    """The component would not start, or not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    text: str
    fix: str = ""
    """The remedy; empty where none is needed."""


def ok(check: str, text: str) -> Finding:
    """A finding that needs no change."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, fix: str) -> Finding:
    """A finding that is worth a change."""
    return Finding(check, Level.WARN, text, fix)


def fail(check: str, text: str, fix: str) -> Finding:
    """A finding that must be mended before the component starts."""
    return Finding(check, Level.FAIL, text, fix)


def failed(findings: Iterable[Finding]) -> bool:
    """Whether one of them has failed."""
    return any(finding.level is Level.FAIL for finding in findings)


def worst(findings: Iterable[Finding]) -> Finding:
    """The first of the worst level; there must be one."""
    order = list(Level)
    return max(findings, key=lambda finding: order.index(finding.level))
