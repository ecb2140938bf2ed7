"""Quantities as people write them on a command line."""

from __future__ import annotations

import math
import re

from shared.errors import ConfigError

_COUNT_UNITS = {"": 1, "k": 1000, "m": 1_000_000, "ki": 1 << 10, "mi": 1 << 20}
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def count_of(text: str, option: str, most: int, least: int = 1) -> int:
    """A whole number: `8000`, `128k` (128,000), `128Ki` (131,072). Raises ConfigError naming the option."""
    number, unit = _split(text, option, _COUNT_UNITS, "a whole number such as 8000, 128k (128,000) or 128Ki (131,072)")
    value = number * _COUNT_UNITS[unit]
    _check(value, text, option, least, most, "")
    if value != int(value):
        raise ConfigError(f"--{option}: {text.strip()} is {value:g}, not a whole number", field=option, value=text)
    return int(value)


def seconds_of(text: str, option: str, most: float) -> float:
    """A time above 0: `1s`, `40ms`, `2min`; without unit seconds. Raises ConfigError naming the option."""
    number, unit = _split(text, option, _TIME_UNITS, "a time such as 1s or 40ms")
    value = number * _TIME_UNITS[unit]
    _check(value, text, option, 1e-6, most, " s")
    return value


def _split(text: str, option: str, units: dict[str, int] | dict[str, float], expected: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ConfigError(f"--{option}: expected {expected}, got {text!r}", field=option, value=text)
    return float(match[1]), match[2].lower()


def _check(value: float, text: str, option: str, least: float, most: float, unit: str) -> None:
    if not least <= value <= most or not math.isfinite(value):
        raise ConfigError(
            f"--{option}: must be from {least:.15g} to {most:.15g}{unit}, got {text.strip()}",
            field=option,
            limit=least if value < least else most,
            value=text,
        )


def between(value: float, option: str, least: float, most: float) -> float:
    """The value, which must be in these bounds. Raises ConfigError naming the option."""
    if not least <= value <= most:  # also false for NaN
        raise ConfigError(
            f"--{option}: must be from {least:g} to {most:g}, got {value:g}",
            field=option,
            limit=most if value > most else least,
            value=value,
        )
    return value
