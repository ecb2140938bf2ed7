"""Durations as text: a number with its unit."""

from __future__ import annotations

import re

from shared.errors import ConfigError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


def parse_duration_s(text: str, field: str) -> float:
    """Seconds in `200ms`, `1.5s`, `2m`; raises ConfigError naming `field`, also if the unit is missing."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{field}={text}: expected a duration such as 200ms or 1.5s", field=field, value=text)
    number, unit = match["number"], match["unit"].lower()
    if not unit:
        raise ConfigError(
            f"{field}={text} has no unit: write {field}={number}ms or {field}={number}s", field=field, value=text
        )
    if unit not in _SECONDS:
        raise ConfigError(
            f"{field}={text}: unknown unit {unit!r}, known are {', '.join(_SECONDS)}", field=field, value=text
        )
    return float(number) * _SECONDS[unit]


def format_ms(seconds: float) -> str:
    """A duration as text: three significant digits, in ms or s."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms"
