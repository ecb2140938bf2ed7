"""Durations with units, and the latency targets that are written with them."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


_NAMES = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; None = no target of that kind. At least one is set."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.ttft_s is None and self.tpot_s is None:
            raise ConfigError("slo needs a target, as in ttft=200ms,tpot=30ms", field="slo")
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if value is not None and not value > 0:
                raise ConfigError(f"slo {name} must be above 0", field="slo", value=value)

    def met(self, ttft_s: float, tpot_s: float | None) -> bool:
        """Whether a finished request met every target; a request of one token has no TPOT and cannot miss it."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s

    def as_ms(self) -> dict[str, float | None]:
        """Milliseconds by name, for the result files."""
        parts = (("ttft", self.ttft_s), ("tpot", self.tpot_s))
        return {name: None if value is None else value * 1e3 for name, value in parts}

    def __str__(self) -> str:
        parts = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        return ", ".join(f"{name} ≤ {format_ms(value)}" for name, value in parts if value is not None)


def parse_slo(text: str) -> Slo:
    """`ttft=200ms,tpot=30ms`, or only one of them; raises ConfigError (`slo` or the part's name)."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().lower()
        if not equals or name not in _NAMES:
            raise ConfigError(
                f"slo: cannot read {part.strip()!r}; expected ttft=200ms,tpot=30ms", field="slo", value=text
            )
        if name in values:
            raise ConfigError(f"slo: {name} is given twice", field="slo", value=text)
        values[name] = parse_duration_s(value, name)
    return Slo(values.get("ttft"), values.get("tpot"))
