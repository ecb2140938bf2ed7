"""Numbers of bytes, for people."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """`1.5 MiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 or num_bytes >= 100 else f"{num_bytes:.1f} {_UNITS[unit]}"
